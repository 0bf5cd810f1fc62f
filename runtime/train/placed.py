"""Optimizers and the places of parameters: one that the user made is given the placed parameters, one that would be wrong is refused."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.driver.optimizers import takes_closure
from autopar.driver.train_step import Scope
from autopar.errors import AutoparError
from autopar.runtime.execute.world import DistributedWorld
from autopar.runtime.module.placement import dtensor_placements


def placed_instance(optimizer: Optimizer, first: Mapping[str, nn.Parameter], parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """`optimizer`, made of the parameters that were there `first`, of those that took their places; what other stages hold is left out.

    Raises `AutoparError` where it has state of the former already.
    """
    names = {id(each): name for name, each in first.items()}
    if all(parameters.get(name) is each for name, each in first.items()):
        return optimizer
    if optimizer.state:
        raise AutoparError(
            "the optimizer has stepped before its parameters were placed, and its state is that of whole parameters: compile before the "
            "first step, or pass its class to autopar.compile and load its state afterwards"
        )
    for group in optimizer.param_groups:
        held = (parameters.get(names[id(each)]) for each in group["params"])
        group["params"] = [each for each in held if each is not None]
    return optimizer


def check_places(optimizer: Optimizer, scope: Scope, parameters: Mapping[str, nn.Parameter], world: DistributedWorld) -> None:
    """Raise `AutoparError` where a statistic of the optimizer would be that of a part: it computes over DTensors then, which cannot
    do everything, and over those of one stage alone."""
    kind = type(optimizer).__name__
    if takes_closure(optimizer):
        raise AutoparError(f"{kind} joins all parameters into one vector, which those of several placements do not: use a virtual mesh")
    if scope == "element":
        return
    if scope == "model" and "pp" in world.mesh.names and world.mesh.size_of(world.mesh.parts("pp")) > 1:
        raise AutoparError(
            f"{kind} is not known to treat each parameter by itself, and with pp on processes it sees those of one stage alone: a "
            'statistic over all parameters would be wrong. If it has none, say so: train_step=TrainStep(update_scope="parameter")'
        )
    chosen = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in parameters.items():
        placement = world.placements.get(name)
        if placement is None or id(parameter) not in chosen or not isinstance(parameter, DTensor):
            continue
        is_strided = any(type(each).__name__ == "_StridedShard" for each in dtensor_placements(placement))
        if is_strided or placement.padding is not None:
            how = "in strided shards" if is_strided else "padded"
            raise AutoparError(
                f"{kind} takes statistics of whole parameters, and {name!r} lies {how} ({placement.sharding.describe(placement.dims)}), "
                "over which DTensor does not compute them rightly: pin this parameter to another sharding, or use an elementwise optimizer "
                'for it. If every number is updated by itself, say so: train_step=TrainStep(update_scope="element")'
            )
