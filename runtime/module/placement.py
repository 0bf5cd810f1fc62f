"""Parameters of a real mesh: each process holds its part, as a DTensor under the parameter's own name."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as DTensorPlacement

from autopar._torch import fake_mode
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.graph.autocast import Autocast
from autopar.ir.mesh import Mesh
from autopar.ir.padding import padded, unpadded
from autopar.ir.placement import Placement
from autopar.ir.printing import short_dtype
from autopar.ir.program import Signature
from autopar.ir.sharding import Dims, Sharding
from autopar.runtime._torch import dtensor_like, hand_on_hooks, local_part, storage_key
from autopar.runtime.birth.slots import get, names_of, put
from autopar.runtime.execute.group_cache import known_or_made
from autopar.runtime.module.gathers import can_gather
from autopar.runtime.module.inputs import checksum
from autopar.runtime.module.parameters import local_shard, same_placement
from autopar.runtime.module.pieces import words_of
from autopar.runtime.module.without_values import KEEPS_MEMORY, STRIDES, hand_on_attributes, stands_in
from autopar.runtime.offload.stored import Store

logger = logging.getLogger("autopar")
# Placed parameters that several stages of a pipeline hold.
_on_stages: list[weakref.ref[nn.Parameter]] = []


def placements_of(signature: Signature, mesh: Mesh) -> dict[str, Placement]:
    """Where each parameter of a LOCAL signature lies."""
    found = {}
    for item in signature.inputs_of("parameter"):
        assert item.sharding is not None, f"parameter {item.name} has no sharding"
        found[item.name] = Placement(item.dims, item.sharding, mesh, item.padding)
    return found


def all_placements(model: nn.Module, signature: Signature, mesh: Mesh) -> dict[str, Placement]:
    """Where each parameter of `model` lies: those that the program does not use, and those that forward writes, are replicated."""
    used = placements_of(signature, mesh)
    return used | {name: whole_placement(parameter, mesh) for name, parameter in model.named_parameters() if name not in used}


def written_whole(placements: Mapping[str, Placement], signature: Signature) -> dict[str, Placement]:
    """Those of `placements` that are of parameters which forward writes, as later calls are to know them; they lie whole."""
    written = ((item.name, placements[item.name]) for item in signature.written_parameters)
    return {name: replace(each, is_written=True) for name, each in written if each.sharding.is_replicated}


def dtensor_placements(placement: Placement) -> tuple[DTensorPlacement, ...]:
    """DTensor's words for a placement: one per axis of its mesh, in the order of the mesh."""
    names = placement.mesh.names
    dims = ([(size, None if axis is None else names.index(axis)) for size, axis in pieces] for pieces in _pieces(placement))
    return tuple(words_of(dims, len(names)))


def torch_can_gather(placement: Placement) -> bool:
    """Whether `DTensor.full_tensor` is right for it. What is padded lies as torch cuts it along one axis."""
    sizes = [size for _, size in placement.mesh.axes]
    return not _is_cut_otherwise(placement) and can_gather(dtensor_placements(placement), sizes, placement.shape)


def _is_cut_otherwise(placement: Placement) -> bool:
    """Whether the parts of a padded dim are not those that `torch.chunk` cuts: several axes, or an atom among others."""
    if placement.padding is None:
        return False
    splits = iter(placement.sharding.splits)
    for before, after in zip(placement.padding.before, placement.dims, strict=True):
        axes = [axis for _ in after for axis in next(splits)]
        if before != after and axes and (len(axes) > 1 or len(after) > 1):
            return True
    return False


def torch_can_gather_tensor(tensor: DTensor) -> bool:
    """Likewise for a tensor that lies wherever it does."""
    return can_gather(tensor.placements, tensor.device_mesh.shape, tensor.shape)


def _pieces(placement: Placement) -> Iterator[list[tuple[int, str | None]]]:
    """Each dim as its pieces, major first: the size and the axis that indexes it, None for what stays whole."""
    splits, axis_sizes = iter(placement.sharding.splits), dict(placement.mesh.axes)
    for dim in placement.dims:
        pieces: list[tuple[int, str | None]] = []
        for atom in dim:
            split = next(splits)
            pieces += [(axis_sizes[axis], axis) for axis in split]
            pieces.append((atom // placement.mesh.size_of(split), None))
        yield pieces


def check_placements(
    first: Mapping[str, Placement], now: Mapping[str, Placement], signature: Signature, holders: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `PlanError` where a call, of a LOCAL signature, was compiled for other parameters than those that lie on processes since the
    `first` capture. `holders` are the stages by parameter."""
    for name, placement in now.items():
        if name in first and not same_placement(first[name], placement):
            was, wanted = (each.sharding.describe(each.dims) for each in (first[name], placement))
            raise PlanError(f"parameter {name!r} lies as {was} since the first capture; this call was compiled for {wanted}")
    for item in signature.written_parameters:
        lies = first.get(item.name)
        if lies is not None and (not lies.sharding.is_replicated or lies.stages):
            raise PlanError(
                f"parameter {item.name!r}, into which forward writes, lies {lies.sharding.describe(lies.dims)} since the first call, which "
                "only read it; what forward writes lies whole on all ranks: let the first call (or example_inputs) be one that writes it, "
                "as in training mode"
            )
    check_copies_trained(first, holders, [item.name for item in signature.outputs_of("gradient")])


def check_copies_trained(first: Mapping[str, Placement], holders: Mapping[str, tuple[int, ...]], trained: Collection[str]) -> None:
    """Raise `PlanError` where a call trains a parameter that several stages hold since the `first` capture, and other stages read it now:
    a copy that gets no gradient would keep what it was, and later calls would read it."""
    for name in trained:
        before, now = first[name].stages if name in first else (), holders.get(name, ())
        if len(before) > 1 and now and set(before) != set(now):
            has, reads = (" and ".join(map(str, each)) for each in (before, now))
            raise PlanError(
                f"parameter {name!r} is held by stages {has} of the pipeline since the first capture, each its copy; this call, compiled "
                f"for other shapes, would train that of stage {reads} alone: give calls one shape (pad_to=, drop_last=True), or compile "
                "the model again for calls of this kind"
            )


def stage_device_mesh(device_mesh: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """The part of `device_mesh` that holds this rank's stage, with the axes of `mesh`; collective."""
    names = device_mesh.mesh_dim_names
    assert names is not None
    if "pp" not in names:
        return device_mesh
    if not set(mesh.names) <= set(names):  # there is nothing beside pp
        device_mesh = _known_mesh(device_mesh.device_type, device_mesh.mesh.unsqueeze(-1), (*names, *mesh.names))
    return device_mesh[mesh.names]


def refined_device_mesh(device_mesh: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """`device_mesh` with its axes broken into those of `mesh`; collective. The mesh itself when they agree."""
    if Mesh.of(device_mesh) == mesh:
        return device_mesh
    ranks = device_mesh.mesh.reshape([size for _, size in mesh.axes])
    return _known_mesh(device_mesh.device_type, ranks, mesh.names)


def _known_mesh(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of these ranks, made once: it has groups of its own along each of its axes."""
    key = "mesh", device_type, tuple(ranks.shape), tuple(ranks.flatten().tolist()), names
    return known_or_made(key, lambda: DeviceMesh(device_type, ranks, mesh_dim_names=names))


def wrap(local: torch.Tensor, placement: Placement, device_mesh: DeviceMesh) -> DTensor:
    """The DTensor whose part on this rank is `local`."""
    shape = torch.Size(placement.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, device_mesh, dtensor_placements(placement), run_check=False, shape=shape, stride=stride)


def held_part(whole: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """What `rank` holds of a parameter: its part without the padding."""
    part = local_shard(padded(whole, placement.padding), placement.dims, placement.sharding, placement.mesh, rank)
    return unpadded(part, placement.local_padding(rank))


def like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """`local` as this rank's part of a DTensor that lies as `parameter` does, but for its device: state may be kept on the host."""
    if local.dtype is (part := local_part(parameter)).dtype and local.shape == part.shape:
        return dtensor_like(parameter, local)
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def widened(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient that is held in a lower dtype, in that of its parameter; another as it is."""
    if gradient.dtype == parameter.dtype:
        return gradient
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return like(parameter, local_part(gradient).to(parameter.dtype))
    return gradient.to(parameter.dtype)


def part_of_data(tensor: DTensor, value: object) -> torch.Tensor | None:
    """What a rank holds once `tensor.data = value`; None of what nobody here has placed, which is left to torch.

    Raises `AutoparError` where a placed parameter is given what is not of its shape and dtype, or does not lie as it does.
    """
    wanted = _lying(tensor)
    if isinstance(value, DTensor) and (value.device_mesh, _lying(value)) == (tensor.device_mesh, wanted):
        part = local_part(value).detach()
        return local_part(tensor).detach().copy_(part) if getattr(tensor, KEEPS_MEMORY, False) else part
    if not hasattr(tensor, KEEPS_MEMORY):
        return None
    found = _lying(value) if isinstance(value, torch.Tensor) else repr(value)
    raise AutoparError(
        f"a parameter on processes, {wanted}, is given other data (p.data = x): {found}. Write it in place: with torch.no_grad(): "
        "p.copy_(x); a whole tensor is made to lie as p does by distribute_tensor(x, p.device_mesh, p.placements) of "
        "torch.distributed.tensor, on every rank"
    )


def _lying(tensor: torch.Tensor) -> str:
    form = f"{short_dtype(tensor.dtype)}{list(tensor.shape)}"
    return f"{form} {tensor.placements}" if isinstance(tensor, DTensor) else f"a plain {form}"


def is_on_stages(tensor: DTensor) -> bool:
    """Whether `tensor` shows memory of a parameter that several stages of a pipeline hold, each its copy, or of its gradient."""
    own = storage_key(local_part(tensor))
    found = (held for each in _on_stages if (parameter := each()) is not None for held in (parameter, parameter.grad))
    return any(isinstance(each, DTensor) and storage_key(local_part(each)) == own for each in found)


def check_equal_models(model: nn.Module, gather: Callable[..., Sequence[Any]]) -> None:
    """Raise `MeshError` on every rank when ranks start from different values, naming a parameter or buffer and two ranks. Collective.

    Each rank keeps its part of its own model, so unequal models would be mixed into one that nobody built.
    Parameters on meta, on whichever rank, are refused too: they have no values.
    """
    fakes = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    named = (*model.named_parameters(), *model.named_buffers())
    everyone = gather(
        (fakes, {name: "meta" if tensor.is_meta else checksum(tensor) for name, tensor in named}), "a comparison of the ranks' models"
    )
    for rank, (theirs, _) in enumerate(everyone):
        if theirs:
            raise MeshError(
                f"{len(theirs)} parameters are on meta on rank {rank}, the first is {theirs[0]!r}; a real mesh needs their values on "
                'every rank: autopar.compile(..., weights="init"), a path of safetensors files, or "rank0" where rank 0 has them'
            )
    _, first = everyone[0]
    for rank, (_, sums) in enumerate(everyone):
        differing = [name for name in {**first, **sums} if sums.get(name) != first.get(name)]
        if differing:
            raise MeshError(
                f"ranks 0 and {rank} hold different values of {differing[0]!r} ({len(differing)} parameters and buffers differ); "
                "call torch.manual_seed with one seed on all ranks before building the model, or load the same weights"
            )


def place_parameters(
    model: nn.Module,
    placements: Mapping[str, Placement],
    device_mesh: DeviceMesh,
    rank: int,
    device: torch.device,
    held: Container[str],
    parts: Parts | None = None,
    store: Store = lambda _, part: part,
    on_stages: Container[str] = (),
    only: Collection[str] | None = None,
) -> None:
    """Replace every parameter of `model`, or `only` these, by its part on `rank`, a DTensor on `device_mesh`; ties stay ties. `store` may
    move a part. Those `on_stages`, several of them, are marked.

    Those that are not `held`, because only another stage has a use for them, keep their shape and have no values (meta).
    What is held comes from `parts`, else it is of the model's own values: `check_equal_models` comes before it.
    """
    parts = parts or OwnParts(model)
    ungathered = [name for name, placement in placements.items() if not torch_can_gather(placement)] if only is None else []
    if ungathered:
        logger.warning(
            "DTensor.full_tensor() is wrong or raises for %s: use parallel.full_state_dict() for whole values", ", ".join(ungathered)
        )
    for name, names in names_of(model).items():
        parameter = get(model, name)  # one after another: each is let go of before the next takes memory
        if not isinstance(parameter, nn.Parameter) or (only is not None and name not in only):
            continue
        here, keeps_memory = parameter.detach().to("meta"), False
        if name in held:
            here = wrap(parts.part(name, placements[name], rank).to(device), placements[name], device_mesh)
            part = store(name, local_part(here))
            keeps_memory = part is not local_part(here)
            here = dtensor_like(here, part)
        else:
            parts.elsewhere(name)
        placed = nn.Parameter(here, requires_grad=parameter.requires_grad)
        hand_on_attributes(parameter, placed)
        setattr(placed, KEEPS_MEMORY, keeps_memory)
        setattr(placed, STRIDES, parameter.stride())
        if name in on_stages:
            _on_stages[:] = [*(each for each in _on_stages if each() is not None), weakref.ref(placed)]
        hand_on_hooks(parameter, placed)
        for each in names:
            put(model, each, placed)


class Parts(Protocol):
    """What a rank holds of parameters, asked for in the model's order on every rank; `elsewhere` where it holds nothing."""

    def part(self, name: str, placement: Placement, rank: int) -> torch.Tensor: ...

    def elsewhere(self, name: str) -> None: ...


class OwnParts(Parts):
    """Of the values that the model has."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def part(self, name: str, placement: Placement, rank: int) -> torch.Tensor:
        return held_part(self._model.get_parameter(name), placement, rank)

    def elsewhere(self, name: str) -> None:
        return None


def whole_placement(tensor: torch.Tensor, mesh: Mesh) -> Placement:
    dims: Dims = tuple((size,) for size in tensor.shape)
    return Placement(dims, Sharding.replicated(dims), mesh)


@contextmanager
def global_parameters(model: nn.Module, device: torch.device, without_values: bool = False) -> Generator[None]:
    """While this is entered `model` can be captured: its tensors have global shapes, all on one type of device; values do not matter.

    Fake tensors on `device`, where the model runs, stand for parameters that lie in parts, and for all tensors of a model on meta or one
    `without_values`: torch casts nothing on meta under an autocast. Where `device` is meta itself, of a model that is planned for hardware
    that nobody has started, they are on what an autocast is for, and without one the model is on meta altogether.
    """
    parameters, buffers = list(model.named_parameters(remove_duplicate=False)), list(model.named_buffers(remove_duplicate=False))
    held = parameters + buffers
    if any(isinstance(parameter, DTensor) for _, parameter in parameters):
        replaced = [(name, tensor) for name, tensor in parameters if isinstance(tensor, DTensor) or tensor.is_meta]
    elif without_values or any(tensor.is_meta for _, tensor in held):
        replaced = held
    else:
        replaced = []
    if device.type == "meta" and replaced:
        autocast = Autocast.around("meta")
        device = device if autocast is None else torch.device(autocast.device)
    if device.type == "meta":
        replaced = [(name, tensor) for name, tensor in replaced if not tensor.is_meta]
    with nullcontext() if device.type == "meta" else fake_mode():
        found = stands_in([tensor for _, tensor in replaced], device)
    for name, tensor in replaced:
        put(model, name, found[id(tensor)])
    try:
        yield
    finally:
        for name, tensor in replaced:
            put(model, name, tensor)


def check_conversion(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Raise `AutoparError` where `convert` (of `.to`, `.half`, …) would give a parameter or buffer of `model` on processes, which compute
    on `device`, another dtype or device: programs were made for what they have. It says the same on every rank, whatever that holds.
    """
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        # Parameters may be another stage's, on meta here, or lie in host memory between steps.
        before = torch.empty(0, dtype=each.dtype, device=device if isinstance(each, nn.Parameter) or each.is_meta else each.device)
        after = convert(before)
        dtypes = "convert the model before autopar.compile, or ask autopar.compile for another precision with precision="
        devices = "move the model before autopar.compile, and compile it for a mesh of such devices"
        for has, wanted, remedy in ((before.dtype, after.dtype, dtypes), (before.device, after.device, devices)):
            if has != wanted:
                raise AutoparError(f"{name!r} is {has} on processes, where it is placed, and cannot become {wanted} there; {remedy}")
