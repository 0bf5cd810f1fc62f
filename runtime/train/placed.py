"""Optimizers and the places of parameters: one that the user made is given the placed parameters, one that would be wrong is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from autopar.driver.optimizers import takes_closure
from autopar.driver.train_step import Scope
from autopar.errors import AutoparError
from autopar.ir.placement import Placement
from autopar.runtime._torch import local_part
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.world import World
from autopar.runtime.module.placement import dtensor_placements
from autopar.runtime.train.state import placed_like

logger = logging.getLogger("autopar")


def placed_instance(
    optimizer: Optimizer, first: Mapping[str, nn.Parameter], parameters: Mapping[str, nn.Parameter], world: World | None = None
) -> Optimizer:
    """`optimizer`, made of the parameters that were there `first`, of those that took their places; what other stages hold is left out.

    State that it has from its birth (Adagrad's sums) is split as the parameters are. Raises `AutoparError` where it has stepped already.
    """
    names = {id(each): name for name, each in first.items()}
    if all(parameters.get(name) is each for name, each in first.items()):
        return optimizer
    if any(not _is_at_birth(state) for state in optimizer.state.values()):
        raise AutoparError(
            "the optimizer has stepped before its parameters were placed, and its state is that of whole parameters: compile before the "
            "first step, or pass its class to autopar.compile and load its state afterwards"
        )
    born = {names[id(each)]: optimizer.state.pop(each) for each in list(optimizer.state)}
    for name, state in born.items():
        if name in parameters:
            optimizer.state[parameters[name]] = {
                key: _placed(value, first[name], parameters[name], name, world) for key, value in state.items()
            }
    for group in optimizer.param_groups:
        held = (parameters.get(names[id(each)]) for each in group["params"])
        group["params"] = [each for each in held if each is not None]
    return optimizer


def _is_at_birth(state: Mapping[str, Any]) -> bool:
    """Whether the state of a parameter is one that no step has changed."""
    return "step" in state and not float(state["step"])


def _placed(value: Any, first: nn.Parameter, parameter: nn.Parameter, name: str, world: World | None) -> Any:
    """An entry of the state of `first`, as that of `parameter`."""
    if not (isinstance(value, torch.Tensor) and value.shape == first.shape and isinstance(parameter, DTensor)) or not value.ndim:
        return value
    assert world is not None
    return placed_like(value, parameter, name, world)


def is_seen_whole(optimizer: Optimizer, parameter: nn.Parameter, placement: Placement | None) -> bool:
    """Whether torch cannot compute the statistics that `optimizer` takes of `parameter`, as it lies; see `WholeParameters`."""
    if placement is None or placement.sharding.is_replicated or not isinstance(parameter, DTensor):
        return False
    is_plain = all(type(each) in (Shard, Replicate) for each in dtensor_placements(placement)) and placement.padding is None
    return not is_plain or isinstance(optimizer, torch.optim.Adafactor)


class WholeParameters:
    """The parameters that an optimizer sees whole, as plain tensors, gathered for its step: it takes statistics of whole parameters, and
    DTensor cannot compute them over how these lie, in strided shards or padded. Torch's Adafactor writes in place what DTensor would
    have to lay out anew, so it sees all that are split like this. Their state is whole on every rank that holds a part.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], world: DistributedWorld) -> None:
        chosen = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._world = world
        self._names = {
            id(each): name
            for name, each in parameters.items()
            if id(each) in chosen and is_seen_whole(optimizer, each, world.placements.get(name))
        }
        if self._names:
            logger.warning(
                "%s sees %d parameters whole, gathered at every step, and keeps their state whole on each rank: the first is %r",
                type(optimizer).__name__,
                len(self._names),
                next(iter(self._names.values())),
            )

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._names

    def gather(self, parameter: DTensor) -> torch.Tensor:
        """The parameter with its gradient, whole. Collective over the ranks of its stage."""
        name, gradient = self._names[id(parameter)], parameter.grad
        assert isinstance(gradient, DTensor)
        whole = self._world.whole_at_stage(parameter, name)
        whole.grad = self._world.whole_at_stage(gradient, name)
        return whole

    def put(self, parameter: DTensor, whole: torch.Tensor) -> None:
        """Write this rank's part of `whole`."""
        local_part(parameter).copy_(self._world.part(whole, self._names[id(parameter)]))


def check_places(optimizer: Optimizer, scope: Scope, world: DistributedWorld) -> None:
    """Raise `AutoparError` for an optimizer of `train_step` that cannot know what it would have to."""
    if takes_closure(optimizer):
        kind = type(optimizer).__name__
        raise AutoparError(f"{kind} joins all parameters into one vector, and a process has parts of some: use a virtual mesh")
    check_stages(optimizer, scope, world)


def check_stages(optimizer: Optimizer, scope: Scope, world: DistributedWorld) -> None:
    """Raise `AutoparError` for an optimizer whose update depends on parameters that other stages of a pipeline hold."""
    kind = type(optimizer).__name__
    if scope != "model" or world.mesh.size_of(world.mesh.parts("pp")) == 1:
        return
    if takes_closure(optimizer):
        raise AutoparError(
            f"{kind} joins all parameters into one vector, and with pp on processes it sees those of one stage alone: each would search by "
            "itself. Use a virtual mesh, or a mesh without pp"
        )
    raise AutoparError(
        f"{kind} is not known to treat each parameter by itself, and with pp on processes it sees those of one stage alone: a "
        "statistic over all parameters would be wrong. If it has none, say so to autopar.compile: "
        'train_step=TrainStep(update_scope="parameter")'
    )
