"""What a parallel module and its optimizer are made of, as far as this process holds it: tensors with their places, and plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import CheckpointError
from autopar.ir.padding import Padding
from autopar.ir.sharding import Sharding, shape_of
from autopar.runtime._torch import local_part
from autopar.runtime.checkpoint.plan import Part
from autopar.runtime.checkpoint.slices import Slices, runs_of, whole
from autopar.runtime.checkpoint.values import encode
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.world import World
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.parameters import Placement
from autopar.runtime.module.placement import held_part

MODEL, OPTIMIZER, EMA = "model", "optimizer", "ema"


@dataclass(frozen=True)
class Held:
    """A tensor of `shape` of which `tensor`, a plain one, holds `slices`."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    slices: Slices

    def part(self, kind: str, name: str) -> Part:
        return Part(kind, name, self.tensor.dtype, self.shape, self.slices)


def held_of(tensor: torch.Tensor, name: str, world: World) -> Held:
    """What this process holds of a tensor: of one that lies as the parameter `name` does that part, of another all. Collective over the
    stage for other DTensors."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Held(tensor.detach(), shape, whole(shape))
    local = local_part(tensor).detach()
    if isinstance(world, DistributedWorld) and name in world.placements and world.placements[name].shape == shape:
        return Held(local, shape, slices_of(name, world))
    return Held(tensor.full_tensor().detach(), shape, whole(shape))


def slices_of(name: str, world: DistributedWorld) -> Slices:
    """Which elements of a parameter lie with this rank."""
    placement = world.placements[name]
    return _slices(placement, world._place(placement.mesh))


@lru_cache(maxsize=65536)
def _slices(placement: Placement, rank: int) -> Slices:
    splits, padding = iter(placement.sharding.splits), placement.padding
    found: list[tuple[tuple[int, int], ...]] = []
    for number, dim in enumerate(placement.dims):
        of_dim = Padding((padding.before[number],), (padding.after[number],)) if padding else None
        along = Placement((dim,), Sharding(tuple(next(splits) for _ in dim)), placement.mesh, of_dim)
        size = shape_of((padding.before[number] if padding else dim,))[0]
        found.append(runs_of(held_part(torch.arange(size), along, rank)))
    return tuple(found)


@dataclass(frozen=True)
class ModelState:
    """`held` by name; `forms` also of what only other stages hold. For `ties` and `extra` see `autopar.runtime.checkpoint.index.Index`."""

    held: dict[str, Held] = field(default_factory=dict[str, Held])
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict[str, Any])
    ties: dict[str, str] = field(default_factory=dict[str, str])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def model_state(module: ParallelModule) -> ModelState:
    """Of the names of its state dict. Raises `MeshError` before parameters have places, `CheckpointError` for what no file can hold."""
    model, found = module._model, ModelState()
    dict(module.named_parameters())  # raises where they have no places yet
    own: dict[int, str] = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            found.extra[name] = encode(value, name, _no_tensors)
        elif id(value) not in own:
            raise CheckpointError(
                f"{name!r} of the model's state_dict() is no parameter or buffer of it, so that it cannot be loaded again"
            )
        elif (first := own[id(value)]) != name:
            found.ties[name] = first
        else:
            found.forms[name] = value.dtype, tuple(value.shape)
            if not value.is_meta:
                found.held[name] = held_of(value, name, module._world)
            elif module._world.is_virtual:
                raise CheckpointError(f"{name!r} is on meta, where it has no values; give it some (to_empty, then load or initialise)")
    return found


def _no_tensors(name: str, tensor: torch.Tensor) -> None:
    raise CheckpointError(f"{name!r} has a tensor in its extra state; make it a buffer")


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(each): name for name, each in model.named_parameters()}


def optimizer_values(optimizer: Optimizer, names: Mapping[int, str], keep: Callable[[str, str, torch.Tensor], None]) -> dict[str, Any]:
    """What is no tensor in an optimizer, as JSON; `keep` is told of each tensor its own name, that of its parameter, and the tensor."""
    strange = [each for each in optimizer.state if id(each) not in names]
    strange += [each for group in optimizer.param_groups for each in group["params"] if id(each) not in names]
    if strange:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {list(strange[0].shape)} that is none of the model's: make it of parallel.parameters()"
        )

    def encoded(value: Any, name: str, of: str = "") -> Any:
        return encode(value, name, lambda entry, tensor: keep(entry, of, tensor))

    groups = [
        {
            "params": [names[id(each)] for each in group["params"]],
            "options": {key: encoded(value, f"group {number}/{key}") for key, value in group.items() if key != "params"},
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    state = {names[id(each)]: encoded(dict(of), names[id(each)], names[id(each)]) for each, of in optimizer.state.items()}
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


def the_optimizer(module: ParallelModule, given: Optimizer | None) -> Optimizer | None:
    """The one of `train_step`, or the one given. Raises `CheckpointError` for two."""
    own = module.optimizer
    if own is not None and given is not None and own is not given:
        raise CheckpointError("the parallel module has an optimizer of its own, of train_step, and another is given: leave out optimizer=")
    return own if given is None else given
