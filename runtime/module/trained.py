"""Which parameters are trained, on a pipeline whose ranks have only those of their own stage in hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


def take_over(model: nn.Module, gather: Callable[..., Sequence[Any]]) -> bool:
    """Give parameters that only other stages hold the `requires_grad` that they have there; whether any rank had another. Collective.

    `for p in parallel.parameters(): p.requires_grad_(False)` reaches a stage's own. False, too, where those that hold one do not agree,
    or where ranks have other parameters.
    """
    named = dict(model.named_parameters())
    mine = {name: each.requires_grad for name, each in named.items()}
    everyone = gather((mine, [name for name, each in named.items() if not each.is_meta]), "a comparison of what is trained")
    if any(flags.keys() != mine.keys() for flags, _ in everyone):
        return False
    agreed: dict[str, bool] = {}
    for flags, held in everyone:
        for name in held:
            if agreed.setdefault(name, flags[name]) != flags[name]:
                return False
    for name, each in named.items():
        if each.is_meta:
            each.requires_grad_(agreed.get(name, each.requires_grad))
    return any(flags[name] != wanted for flags, _ in everyone for name, wanted in agreed.items())
