"""State of a parallel module: full and sharded state dicts, and the norm of gradients that lie in parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, PlanError
from autopar.runtime._torch import metadata_of, with_metadata
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.world import World
from autopar.runtime.module._torch import rank_of, ranks_of
from autopar.runtime.module.placement import like, torch_can_gather_tensor


def with_random_state(state: Any, seed: int | None, step: int) -> Any:
    """`state` with seed and step in its metadata, where `nn.Module.load_state_dict` of a plain model does not mind them."""
    metadata_of(state).setdefault("", {})["autopar"] = {"seed": seed, "step": step}
    return state


def random_state_of(state: Mapping[str, Any], seed: int | None, step: int) -> tuple[int | None, int]:
    """Seed and step that `state` carries, or the ones given."""
    found = metadata_of(state).get("", {}).get("autopar")
    return (found["seed"], found["step"]) if found else (seed, step)


def full_state(state: Any, world: World, parameters: Mapping[str, torch.Tensor]) -> Any:
    """`state` (made with `keep_vars=True`) with every parameter whole and detached. Collective."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    full: dict[int, torch.Tensor] = {}
    result: OrderedDict[str, Any] = with_metadata(OrderedDict(), metadata_of(state))
    for key, value in state.items():
        if id(value) in names and id(value) not in full:
            is_placed = world.is_virtual or isinstance(value, DTensor) or value.is_meta
            full[id(value)] = world.full(value, names[id(value)]) if is_placed else value.detach().clone()
        result[key] = full[id(value)] if id(value) in full else _made_by_hooks(value)
    return result


def _made_by_hooks(value: Any) -> Any:
    """What is no parameter, but a buffer, or what the model's hooks made of parameters."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone() if isinstance(whole, torch.Tensor) else whole


def sharded_state(state: Mapping[str, Any], model: nn.Module, world: World) -> Mapping[str, Any]:
    """`state`, a whole one or this rank's own, with each value in the form in which `model` holds it."""
    if not isinstance(world, DistributedWorld):
        return state
    current = model.state_dict(keep_vars=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # The versions of modules' formats are in the metadata: without them each would take the state for one of its oldest format.
    result: OrderedDict[str, Any] = with_metadata(OrderedDict(state), metadata_of(state))
    for key, value in state.items():
        target = current.get(key)
        if isinstance(target, DTensor) and isinstance(value, torch.Tensor) and id(target) in names:
            result[key] = _sharded(value, target, world, names[id(target)])
    # What only another stage holds has no place here; of what is missing all ranks are to hear.
    elsewhere = {key: target for key, target in current.items() if isinstance(target, torch.Tensor) and target.is_meta}
    held = (state[key] for key, target in current.items() if isinstance(target, DTensor) and key in state)
    is_own = elsewhere.keys().isdisjoint(state) and all(isinstance(each, DTensor) for each in held)
    result.update((key, target) for key, target in elsewhere.items() if is_own or key in state)
    return result


@contextmanager
def loads_whole_values(model: nn.Module, world: World) -> Generator[None]:
    """Within it layers of `model` take whole values that their own hooks give other names, or make of others, which `sharded_state` cannot
    foresee. Theirs run before."""
    if not isinstance(world, DistributedWorld):
        yield
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def shard(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, target in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and isinstance(target, DTensor):
                state[prefix + name] = _sharded(value, target, world, names[id(target)])
            elif value is not None and target.is_meta:  # another stage's
                state[prefix + name] = target

    handles = [module.register_load_state_dict_pre_hook(shard) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_part_of_another(value: DTensor, name: str) -> None:
    """Raise `PlanError` where `value` was saved as the part of another rank, or of another stage, as its mesh remembers: the usual slip is
    a `state_dict()` that rank 0 alone has saved."""
    saver, own = rank_of(value.device_mesh), dist.get_rank()
    if saver == own:
        return
    ranks = ranks_of(value.device_mesh)
    here, there = ((ranks == rank).nonzero().tolist() for rank in (own, saver))
    if here and there:
        places = zip(here[0], there[0], value.placements, strict=True)
        is_own = all(one == other or lies.is_replicate() for one, other, lies in places)
    else:  # of another stage where this rank is in the mesh; whole in a file of fewer ranks where it is not
        is_own = not here and all(lies.is_replicate() for lies in value.placements)
    if not is_own:
        raise PlanError(
            f"{name!r} as it is loaded is the part of rank {saver}, and this is rank {own}: state_dict() is a rank's own. Save "
            "parallel.full_state_dict(), which any rank loads, and parallel.train_state_dict(); or each rank's state_dict() in a file of "
            "its own; or let autopar.save or torch.distributed.checkpoint do it"
        )


def _sharded(value: torch.Tensor, target: DTensor, world: DistributedWorld, name: str) -> torch.Tensor:
    if isinstance(value, DTensor):
        refuse_part_of_another(value, name)
        if value.device_mesh == target.device_mesh and value.placements == target.placements:
            return value
        if not torch_can_gather_tensor(value):
            raise PlanError(
                f"{name!r} was saved as {value.placements} on {value.device_mesh.shape} ranks and lies as {target.placements} now; torch "
                "cannot gather the saved parts: save with full_state_dict() to load on another mesh or plan"
            )
        value = value.full_tensor()
    if value.shape != target.shape:
        return value  # nn.Module names both shapes
    local = target.to_local()
    return like(target, world.part(value, name).to(local.device, local.dtype))


def clip_grad_norm(
    parameters: Mapping[str, nn.Parameter], world: World, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """See `ParallelModule.clip_grad_norm_`."""
    if not isinstance(world, DistributedWorld):
        return torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm, norm_type, error_if_nonfinite)
    if norm_type <= 0:
        raise AutoparError(f"norm_type={norm_type} is no norm that ranks can put together from their parts; use a positive one, or inf")
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    total, dtype = total_norm(gradients, world, norm_type), _norm_dtype(gradients, world)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the total norm of the gradients is {total.item()}, so they cannot be clipped")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients.values():
        local = _local(gradient)
        local.mul_(scale.to(local.device, local.dtype))
    return total.to(dtype)


def total_norm(gradients: Mapping[str, torch.Tensor], world: World, norm_type: float) -> torch.Tensor:
    """The norm over all parts, each counted on one of the ranks that hold it, summed in float64. Collective; nobody looks at a value, since
    on a GPU the host would wait for it."""
    counted = [_local(each) for name, each in gradients.items() if not isinstance(world, DistributedWorld) or world.is_first(name)]
    wides = [torch.promote_types(each.dtype, torch.float32) for each in counted]
    norms = [torch.linalg.vector_norm(each, norm_type, dtype=wide) for each, wide in zip(counted, wides, strict=True)]
    if not isinstance(world, DistributedWorld):
        return torch.linalg.vector_norm(torch.stack(norms).double(), norm_type) if norms else torch.zeros(())
    is_maximum = norm_type == float("inf")
    device = world.groups.device  # gradients may lie on the host
    own = torch.stack(norms).double().to(device) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    total = own.amax().view(1) if is_maximum else own.pow(norm_type).sum().view(1)
    everyone = world.groups.along(world.mesh, world.mesh.names)
    with world.groups.naming_all("the norm of the gradients"):
        dist.all_reduce(total, dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM, group=everyone.group)
    return total[0] if is_maximum else total[0] ** (1 / norm_type)


def _norm_dtype(gradients: Mapping[str, torch.Tensor], world: DistributedWorld) -> torch.dtype:
    """The dtype that torch would give the norm: promotion needs no words between ranks but which dtypes there are. Collective."""
    mine = {each.dtype.to_real() for each in gradients.values()}
    are_there = world.groups.maxima([dtype in mine for dtype in _NORM_DTYPES], "the dtypes of the gradients")
    found = [dtype for dtype, is_there in zip(_NORM_DTYPES, are_there, strict=True) if is_there]
    return reduce(torch.promote_types, found or [torch.float32])


_NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
