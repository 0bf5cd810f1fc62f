"""Parts and wholes: what one rank holds of a value, and the value put together again.

A tensor of `Dims` is seen as its flat atoms, and each atom as the axes that split it, major first,
with what remains. For ((2, 8),) with the inner atom split by tp = 4:

    [16]  →  [2, 8]  →  [2, 4, 2]      rank i along tp holds [:, i, :]  →  [2, 2]  →  [4]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.sharding import Dims, Sharding, flat, shape_of


@lru_cache(maxsize=65536)
def _geometry(dims: Dims, sharding: Sharding, mesh: Mesh, rank: int) -> tuple[tuple[int, ...], tuple[int | slice, ...]]:
    """The sizes to view the whole as, and the index of `rank`'s part in that view."""
    problems = sharding.problems(dims, mesh)
    assert not problems, problems
    sizes: list[int] = []
    chosen: list[int | slice] = []
    at, axis_sizes = mesh.coordinates(rank), dict(mesh.axes)
    for atom, split in zip(flat(dims), sharding.splits, strict=True):
        for axis in split:
            sizes.append(axis_sizes[axis])
            chosen.append(at[axis])
        sizes.append(atom // mesh.size_of(split))
        chosen.append(slice(None))
    return tuple(sizes), tuple(chosen)


def piece(whole: torch.Tensor, dims: Dims, sharding: Sharding, mesh: Mesh, rank: int) -> torch.Tensor:
    """The part of contiguous `whole` that lies with `rank`, as a view in local atoms."""
    sizes, chosen = _geometry(dims, sharding, mesh, rank)
    return whole.view(sizes)[chosen]


def local_shard(tensor: torch.Tensor, dims: Dims, sharding: Sharding, mesh: Mesh, rank: int) -> torch.Tensor:
    """`rank`'s part of the global `tensor`: a contiguous copy of `sharding.local_shape(dims, mesh)`.

    A value unreduced over an axis lies with the first rank along it; the others hold zeros (a sum) or −inf (a logsumexp),
    or it lies with all (a maximum), so that `assemble` gives it back.
    """
    part = piece(tensor.detach().contiguous(), dims, sharding, mesh, rank)
    part = part.clone(memory_format=torch.contiguous_format).view(sharding.local_shape(dims, mesh))
    summed = tuple(axis for axis, kind in sharding.unreduced if kind == "sum")
    exponents = tuple(axis for axis, kind in sharding.unreduced if kind == "logsumexp")
    part = part.zero_() if mesh.index(rank, summed) else part
    return part.fill_(-torch.inf) if mesh.index(rank, exponents) else part


def assemble(
    parts: Mapping[int, torch.Tensor], dims: Dims, sharding: Sharding, mesh: Mesh, *, check_replicas: bool = False
) -> torch.Tensor:
    """The global tensor from every rank's part: the exact inverse of `local_shard`.

    Ranks along an unreduced axis are summed, or reduced by its kind. Ranks along other unused axes hold
    copies; one is read. With `check_replicas` unequal copies are an AssertionError naming the ranks.
    """
    first = parts[0]
    whole = torch.empty(shape_of(dims), dtype=first.dtype, device=first.device)
    local = flat(sharding.local_dims(dims, mesh))
    unreduced = tuple(axis for axis, _ in sharding.unreduced)
    kind = sharding.unreduced[0][1] if sharding.unreduced else "sum"
    assert all(other == kind for _, other in sharding.unreduced), f"sums of maxima are not supported: {sharding}"
    for rank in replicas(sharding, mesh):
        target = piece(whole, dims, sharding, mesh, rank)
        part = parts[rank].reshape(local)
        if mesh.index(rank, unreduced) == 0:
            target.copy_(part)
        elif kind == "max":
            torch.maximum(target, part, out=target)
        elif kind == "logsumexp":
            torch.logaddexp(target, part, out=target)
        else:
            target.add_(part)
    if check_replicas:
        difference, one, other = replica_difference(parts, sharding, mesh)
        assert difference == 0, f"ranks {one} and {other} should hold the same part, but differ by {difference}"
    return whole


@lru_cache(maxsize=4096)
def replicas(sharding: Sharding, mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """The first holder of each distinct part, with all ranks that hold the same one."""
    holders: dict[int, list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        first = mesh.rank_at({axis: index if axis in sharding.axes else 0 for axis, index in at.items()})
        holders.setdefault(first, []).append(rank)
    return {first: tuple(ranks) for first, ranks in holders.items()}


def replica_difference(parts: Mapping[int, torch.Tensor], sharding: Sharding, mesh: Mesh) -> tuple[float, int, int]:
    """The largest absolute difference between ranks that should hold the same part, and two such ranks; NaNs are equal."""
    worst = (0.0, 0, 0)
    for first, ranks in replicas(sharding, mesh).items():
        for other in ranks[1:]:
            if torch.equal(parts[first], parts[other]):
                continue  # as nearly all are, and the sum below takes ten times as long
            one, two = (_real(parts[rank]).double() for rank in (first, other))
            gap = torch.where((one == two) | (one.isnan() & two.isnan()), torch.zeros_like(one), (one - two).abs())
            difference = float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0
            if difference > worst[0]:
                worst = (difference, first, other)
    return worst


def _real(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part.resolve_conj()) if part.is_complex() else part


def indices(placement: Placement, rank: int) -> tuple[torch.Tensor, ...]:
    """For each dim the int64 indices that lie with `rank`: equal placements have equal indices, whatever their atoms and mesh."""
    splits = iter(placement.sharding.splits)
    found = []
    for dim in placement.dims:
        sharding = Sharding(tuple(next(splits) for _ in dim))
        found.append(local_shard(torch.arange(shape_of((dim,))[0]), (dim,), sharding, placement.mesh, rank))
    return tuple(found)


def same_placement(one: Placement, other: Placement) -> bool:
    """Whether every rank holds the same elements in the same order under both."""
    return all(
        len(mine) == len(theirs) and torch.equal(mine, theirs)
        for rank in range(one.mesh.size)
        for mine, theirs in zip(indices(one, rank), indices(other, rank), strict=True)
    )
