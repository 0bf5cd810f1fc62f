"""What an optimizer keeps in itself, or in the options of its groups: steps that are made in parts must leave it alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autopar.errors import AutoparError

Options = Sequence[dict[str, Any]]
# What torch's schedules of learning rates note, besides what is no option.
_NOT_ITS_OWN = ("param_groups", "state", "params", "_opt_called", "_step_count")


def options_of(optimizer: Optimizer) -> Options:
    """The attributes of `optimizer`, and the options of each group that has parameters."""
    groups = (group for group in optimizer.param_groups if group["params"])
    return [{name: value for name, value in each.items() if name not in _NOT_ITS_OWN} for each in (vars(optimizer), *groups)]


def refuse_changed(optimizer: Optimizer, before: Options, after: Options) -> None:
    """Raise `AutoparError` where a step of some parameters has changed what those of others read, too."""
    changed = next(_changed(before, after), None)
    if changed is not None:
        name, old, new = changed
        raise AutoparError(
            f"the step of {type(optimizer).__name__} changed its own {name!r} from {old!r} to {new!r}: parameters are updated in several "
            "steps, a few at a time, and each would. Keep it in the state of each parameter, state[parameter], as torch's optimizers count "
            'steps, or say TrainStep(update_scope="model"), with which all are updated at once'
        )


def _changed(before: Options, after: Options) -> Iterator[tuple[str, Any, Any]]:
    for old, new in zip(before, after, strict=True):
        yield from ((name, old.get(name), value) for name, value in new.items() if not _is_same(old.get(name), value))


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (not isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor) and type(old) is type(new) and old == new)
