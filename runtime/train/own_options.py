"""What an optimizer of a class that nobody knows counts in itself, or in its groups: one that is stepped in parts must not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from autopar.errors import AutoparError

Counts = Sequence[Mapping[str, float]]


def counts_of(optimizer: Optimizer) -> Counts:
    """Whole numbers among the attributes of `optimizer`, and all numbers among the options of each group. Names of its own begin with _."""
    own = {name: value for name, value in vars(optimizer).items() if type(value) is int and not name.startswith("_")}
    return [own, *({name: value for name, value in group.items() if type(value) in (int, float)} for group in optimizer.param_groups)]


def refuse_changed(optimizer: Optimizer, before: Counts, after: Counts) -> None:
    """Raise `AutoparError` where a step of some parameters has changed what that of others is about to read."""
    for old, new in zip(before, after, strict=True):
        name = next((name for name, value in new.items() if old.get(name) != value), None)
        if name is not None:
            raise AutoparError(
                f"the step of {type(optimizer).__name__} changed its own {name!r} from {old.get(name)!r} to {new[name]!r}: parameters are "
                "updated in several steps, a few at a time, and each would. Keep it in the state of each parameter, state[parameter], as "
                'torch\'s optimizers count steps, or say TrainStep(update_scope="model"), with which all are updated at once'
            )


def hand_back(stood_in: Optimizer, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """What an object that stepped in the place of `optimizer` has noted in itself, and in the options of these `groups` of it."""
    vars(optimizer).update({name: value for name, value in vars(stood_in).items() if name not in ("param_groups", "state")})
    for group, stepped in zip(groups, stood_in.param_groups, strict=True):
        group.update({name: value for name, value in stepped.items() if name != "params"})
