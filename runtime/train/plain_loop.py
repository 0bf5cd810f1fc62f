"""The optimizer of a plain loop, which the user made of a parallel module's parameters and steps by themselves.

    optimizer.step()         the parameters are DTensors, so is the state between steps
      └─ the class's step    of those that go element by element sees this rank's parts as plain tensors, as `train_step` has it

Torch lets a hook that runs before each step say whose step it is: that is another object with the same options, so that an error in the
midst of it leaves the groups and the state of the user's own in place. One that takes statistics sees the DTensors, of which torch computes
them; where these lie so that it cannot, or other stages of a pipeline hold the rest, the step is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopar.driver.optimizers import scope_of, takes_closure
from autopar.driver.train_step import Scope
from autopar.errors import AutoparError
from autopar.runtime._torch import around_steps, has_step_hooks, lies_as
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.module.placement import torch_can_gather
from autopar.runtime.module.state import refuse_part_of_another
from autopar.runtime.train.own_options import hand_back
from autopar.runtime.train.placed import check_stages, is_seen_whole
from autopar.runtime.train.runs import State
from autopar.runtime.train.stand_ins import StandIns, joining
from autopar.runtime.train.trainer import Trainer

# Where the parameters of parallel modules on processes lie.
_PLACED: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Those that stood there before, where somebody still holds them, with their names.
_REPLACED: WeakIdKeyDictionary = WeakIdKeyDictionary()
_STAND_INS: WeakKeyDictionary[Optimizer, StandIns] = WeakKeyDictionary()
# By what steps in the place of an optimizer that may count its steps the groups of that.
_STEPPED: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


class Home(NamedTuple):
    """Whose parameter it is: of a module in `world`, where it has this name. `scope` is what the user says of an optimizer whose class
    nobody knows: of the class `said_of`, of any where that is None."""

    world: ref[DistributedWorld]
    name: str
    scope: Scope | None
    said_of: type[Optimizer] | None


def step_by_parts(
    parameters: Iterable[tuple[str, nn.Parameter]],
    world: DistributedWorld,
    trainer: Trainer,
    replaced: Mapping[str, ref[nn.Parameter]] | None = None,
) -> None:
    """From now on optimizers of nothing but such `parameters`, DTensors of which this process has its part, step by these parts where they
    go element by element, of which the options of `trainer` tell where their class does not. Those of parameters that were `replaced` by
    them, by name, are refused: no gradient comes to these."""
    sample = None if trainer.recipe is None else trainer.recipe.sample
    said_of = None if sample is None else type(sample)
    scope = trainer.options.update_scope
    _PLACED.update({each: Home(ref(world), name, scope, said_of) for name, each in parameters if isinstance(each, DTensor)})
    alive = {name: old for name, each in (replaced or {}).items() if (old := each()) is not None}
    _REPLACED.update({old: name for name, old in alive.items() if old not in _PLACED})
    around_steps(_before, _after)


def _before(optimizer: Optimizer, has_closure: bool) -> Optimizer | None:
    """What steps in place of `optimizer`; None where that does it itself: its hooks, and a closure, are to see what they always did."""
    if _REPLACED:
        _refuse_replaced(optimizer)
    home = next((_PLACED[each] for each in _dtensors(optimizer) if each in _PLACED), None)
    if home is None:
        return None
    scope = _scope(optimizer, home)
    if scope != "element":
        _refuse_statistics(optimizer, scope)
        _refuse_state_of_another(optimizer)
    if has_closure or scope != "element" or optimizer.defaults.get("differentiable") or has_step_hooks(optimizer):
        return None
    # Each is looked at as seldom as can be: there may be hundreds, and they have left the processor's caches since the last step.
    groups = [[(each, grad) for each in group["params"] if (grad := each.grad) is not None] for group in optimizer.param_groups]
    stepped = [each for params in groups for each, _ in params]
    gradients = [grad for params in groups for _, grad in params]
    # A gradient that the user put there may lie otherwise.
    if not stepped or not all(map(lies_as, gradients, stepped)):
        return None
    known, parameters = _STAND_INS.setdefault(optimizer, StandIns()), [[each for each, _ in params] for params in groups]
    entered = known.again(parameters, gradients, optimizer.state)
    if entered is None:
        _refuse_state_of_another(optimizer)
        if not all(each in _PLACED for each in stepped):
            return None
        worlds = [world for each in stepped if (world := _PLACED[each].world()) is not None]
        joins = () if any(world.is_stored for world in worlds) else joining(optimizer)
        entered = known.enter_together(parameters, optimizer.state, joins)
    *firsts, last = entered.rounds(optimizer.param_groups)
    for each in firsts:
        type(optimizer).step(_of(optimizer, each, entered.inner))
    return _of(optimizer, last, entered.inner)


def _of(optimizer: Optimizer, tensors: Sequence[list[torch.Tensor]], state: State) -> Optimizer:
    """Another object with the options and hooks of `optimizer`, of these `tensors`, by group."""
    found = object.__new__(type(optimizer))
    groups = [{**group, "params": params} for group, params in zip(optimizer.param_groups, tensors, strict=True) if params]
    vars(found).update(vars(optimizer), param_groups=groups, state=state)
    if scope_of(optimizer) == "model":  # a class that nobody knows but the user: all is stepped at once, and it may count that
        _STEPPED[found] = [group for group, params in zip(optimizer.param_groups, tensors, strict=True) if params]
    return found


def _refuse_state_of_another(optimizer: Optimizer) -> None:
    """Where its state was saved by another rank, and is that rank's part."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, DTensor) and parameter in _PLACED:
                refuse_part_of_another(value, f"{key} of {_PLACED[parameter].name}")


def _dtensors(optimizer: Optimizer) -> Iterator[Any]:
    return (each for group in optimizer.param_groups for each in group["params"] if isinstance(each, DTensor))


def _scope(optimizer: Optimizer, home: Home) -> Scope:
    scope = scope_of(optimizer)
    is_unknown = scope == "model" and not takes_closure(optimizer)
    return home.scope if is_unknown and home.scope is not None and home.said_of in (None, type(optimizer)) else scope


def _refuse_statistics(optimizer: Optimizer, scope: Scope) -> None:
    """Where the optimizer would compute something else than on whole parameters, or torch cannot compute it."""
    wrong: list[str] = []
    for each in _dtensors(optimizer):
        home = _PLACED.get(each)
        world = None if home is None else home.world()
        if home is None or world is None:
            continue
        check_stages(optimizer, scope, world)
        placement = world.placements.get(home.name)
        is_adafactor = isinstance(optimizer, torch.optim.Adafactor)  # it writes in place what DTensor would have to lay out anew
        cannot = is_seen_whole(optimizer, each, placement) if is_adafactor else placement is not None and not torch_can_gather(placement)
        if cannot and each.grad is not None:
            wrong.append(home.name)
    if wrong:
        kind = type(optimizer).__name__
        takes, own = ("takes", "") if scope == "parameter" else ("may take", f"; or, if it goes element by element, say so: {_SAID}")
        raise AutoparError(
            f"{kind} {takes} statistics of whole parameters, and torch cannot compute them of {len(wrong)} that are split over ranks, as "
            f"they lie; the first is {wrong[0]!r}. Pass optimizer={kind} to autopar.compile and call parallel.train_step, which gathers "
            f"them for its update{own}"
        )


_SAID = 'autopar.compile(..., train_step=TrainStep(update_scope="element"))'


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
    _STAND_INS[optimizer].leave_together(optimizer.state)
    if (groups := _STEPPED.pop(stood_in, None)) is not None:
        hand_back(stood_in, optimizer, groups)
