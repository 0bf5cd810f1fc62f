"""Random draws into what lies on processes (`nn.init.normal_(p)`, `torch.randn_like(p.grad)`): those of one device.

Torch draws each part by its rank's own generator. On a CPU two halves of a parameter are then equal where ranks have one seed, and what
should be the same on two ranks is not where they have several. Here the whole is drawn on every rank, by the generator of the first, and
each takes its part.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import written_operands
from autopar.errors import AutoparError
from autopar.runtime._torch import local_part
from autopar.runtime.execute.process_groups import naming
from autopar.runtime.module import lost_writes
from autopar.runtime.module.gathers import ranks_along
from autopar.runtime.module.placement import is_on_stages, torch_can_gather_tensor


def draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the random `op` gives of DTensors, the first of `args` among them: DTensors that lie as that one. Collective over its mesh.

    Ranks whose generator stood where the first rank's did are where a single process would be; that of another rank stays where it was.
    Raises `AutoparError` where a draw needs values that torch cannot gather, goes into a sum that is not made yet, is for a
    parameter that stages of a pipeline hold in common, or gives what is not of the shape of its operand.
    """
    like = args[0]
    written = written_operands(op, args, kwargs)
    lost_writes.refuse(op, args, kwargs)
    is_written = bool(written)
    if is_written and any(word.is_partial() for word in like.placements):
        raise AutoparError(f"{op} draws into a norm, a sum or the like of what is split over ranks: take .full_tensor() of it first")
    if is_on_stages(like):
        raise AutoparError(
            f"{op} draws for a parameter, or its gradient, that several stages of the pipeline hold, each with its own generator, so that "
            "their copies would differ: draw into parallel.full_state_dict(), and load that by parallel.load_state_dict"
        )
    if any(each is not like for each in written) or op.__name__.startswith("multinomial"):
        raise AutoparError(f"{op} is not drawn of what is split over ranks: take .full_tensor() of it first, on every rank")
    # What is filled, or is only a shape, is not gathered.
    is_read = not (is_written or "_like" in op.__name__)
    whole = [_whole(each, is_read or each is not like) for each in args]
    named = {name: _whole(value, True) for name, value in kwargs.items()}
    with _generator_of_first(like.device_mesh, named.get("generator"), op):
        results = op(*whole, **named)
    if is_written:
        local_part(like).copy_(_part(results, like))
        return like
    return tuple(_lying_as(like, each) for each in results) if isinstance(results, tuple) else _lying_as(like, results)


def _whole(value: Any, has_values: bool) -> Any:
    if not isinstance(value, DTensor):
        return value
    if not has_values:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=local_part(value).device)
    if not torch_can_gather_tensor(value):
        raise AutoparError(f"torch cannot gather what lies as {value.placements}, of which a random draw needs the values")
    return value.full_tensor()


@contextmanager
def _generator_of_first(mesh: DeviceMesh, generator: torch.Generator | None, what: object) -> Generator[None]:
    """While this is entered the generator is where that of the first rank of `mesh` is."""
    generator = generator or torch.default_generator
    own = generator.get_state()
    first = own.clone()
    for dim in range(mesh.ndim):
        ranks = ranks_along(mesh, dim)
        with naming(dist.get_rank(), [rank for rank in ranks if rank != dist.get_rank()], f"the draws of {what}"):
            dist.broadcast(first, src=ranks[0], group=mesh.get_group(dim))
    generator.set_state(first)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            generator.set_state(own)


def _lying_as(like: DTensor, whole: torch.Tensor) -> DTensor:
    """`whole`, which every rank has, as a DTensor that lies as `like`; a sum that is not made yet becomes the same on all ranks."""
    words = [Replicate() if word.is_partial() else word for word in like.placements]
    part = _part(whole, like).clone()
    return DTensor.from_local(part, like.device_mesh, words, run_check=False, shape=whole.shape, stride=whole.stride())


def _part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of `whole`, axis by axis as DTensor cuts: a strided shard inside each of the pieces of those that follow it."""
    part, mesh = whole, like.device_mesh
    for axis, word in enumerate(like.placements):
        if (dim := getattr(word, "dim", None)) is None:
            continue
        pieces = part.unflatten(dim, (getattr(word, "split_factor", 1), -1))
        found = pieces.chunk(mesh.size(axis), dim + 1)
        own = ranks_along(mesh, axis).index(dist.get_rank())
        part = (found[own] if own < len(found) else pieces.narrow(dim + 1, 0, 0)).flatten(dim, dim + 1)
    if part.shape != local_part(like).shape:
        raise AutoparError(
            f"random draws into what lies as {like.placements}, {list(local_part(like).shape)} of {list(like.shape)} on this rank, are not "
            "made: draw them on every rank into a tensor of one device, before autopar.compile or for parallel.load_state_dict"
        )
    return part
