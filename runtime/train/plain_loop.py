"""The optimizer of a plain loop, which the user made of a parallel module's parameters and steps by themselves.

    optimizer.step()         the parameters are DTensors, so is the state between steps
      └─ the class's step    of those that go element by element sees this rank's parts as plain tensors, as `train_step` has it

Torch lets a hook that runs before each step say whose step it is: that is another object with the same options, so that an error in the
midst of it leaves the groups and the state of the user's own in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopar.driver.optimizers import scope_of
from autopar.errors import AutoparError
from autopar.runtime._torch import around_steps, has_step_hooks, lies_as
from autopar.runtime.train.stand_ins import StandIns

# The parameters of parallel modules on processes, by their ids.
_PLACED: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
# Those that stood there before, where somebody still holds them, with their names.
_REPLACED: WeakIdKeyDictionary = WeakIdKeyDictionary()
_STAND_INS: WeakKeyDictionary[Optimizer, StandIns] = WeakKeyDictionary()


def step_by_parts(parameters: Iterable[nn.Parameter], replaced: Mapping[str, ref[nn.Parameter]] | None = None) -> None:
    """From now on optimizers of nothing but such `parameters`, DTensors of which this process has its part, step by these parts, and those
    of parameters that were `replaced` by them, by name, are refused: no gradient comes to these."""
    _PLACED.update({id(each): each for each in parameters if isinstance(each, DTensor)})
    alive = {name: old for name, each in (replaced or {}).items() if (old := each()) is not None}
    _REPLACED.update({old: name for name, old in alive.items() if _PLACED.get(id(old)) is not old})
    around_steps(_before, _after)


def _before(optimizer: Optimizer, has_closure: bool) -> Optimizer | None:
    """What steps in place of `optimizer`; None where that does it itself: its hooks, and a closure, are to see what they always did."""
    if _REPLACED:
        _refuse_replaced(optimizer)
    if has_closure or scope_of(optimizer) != "element" or optimizer.defaults.get("differentiable") or has_step_hooks(optimizer):
        return None
    groups = [(group, [each for each in group["params"] if each.grad is not None]) for group in optimizer.param_groups]
    stepped = [each for _, params in groups for each in params]
    # A gradient that the user put there may lie otherwise.
    if not stepped or not all(_PLACED.get(id(each)) is each and lies_as(each.grad, each) for each in stepped):
        return None
    known, state = _STAND_INS.setdefault(optimizer, StandIns()), defaultdict[Any, dict[str, Any]](dict)
    chosen = [{**group, "params": [known.enter(each, optimizer.state, state) for each in params]} for group, params in groups]
    stands_in = object.__new__(type(optimizer))
    vars(stands_in).update(vars(optimizer), param_groups=chosen, state=state)
    return stands_in


def _refuse_replaced(optimizer: Optimizer) -> None:
    """Where no gradient has come to what was replaced: another model may have it, too."""
    replaced = [each for group in optimizer.param_groups for each in group["params"] if each in _REPLACED]
    if replaced and all(each.grad is None for each in replaced):
        raise AutoparError(
            f"this {type(optimizer).__name__} was made of {len(replaced)} parameters of the model, the first is "
            f"{_REPLACED[replaced[0]]!r}, before they were placed on the mesh: no gradient comes to these, and it would train nothing. "
            "Make it of parallel.parameters(), after autopar.compile(..., example_inputs=...) or the first call; where it was given to "
            "autopar.compile as optimizer=, parallel.train_step steps parallel.optimizer"
        )


def _after(optimizer: Optimizer, stood_in: Optimizer) -> None:
    _STAND_INS[optimizer].leave(optimizer.state, stood_in.state)
