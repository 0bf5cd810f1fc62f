"""Whole tensors from what lies on processes, where torch's own way is wrong: a dim that several axes of the mesh split inside its pieces.

Torch 2.13 gives other values there, mostly without an error, whenever it lays such a tensor out anew: `full_tensor()`, `redistribute`,
operands of a softmax or a product. How views of such a tensor lie (`p.flatten()`) is in `views.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autopar.errors import AutoparError
from autopar.runtime._torch import gathers_strided_shards


def can_gather(words: Sequence[Placement], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor that lies so on a mesh of these `sizes` is gathered right, by torch or here, where every part is as large."""
    return all(_is_even(dim, words, sizes, shape) for dim in _wrong_dims(words, sizes))


def gathered(
    part: torch.Tensor, mesh: DeviceMesh, words: Sequence[Placement], shape: Sequence[int]
) -> tuple[torch.Tensor, list[Placement]] | None:
    """A rank's part of what lies as `words` say, with those dims whole that torch would gather wrongly; and how it lies then.

    None where there are none. Collective over the mesh. Raises `AutoparError`, on every rank, where parts are not as large as each other.
    """
    found = list(words)
    wrong = _wrong_dims(words, mesh.shape)
    for dim in wrong:
        if not _is_even(dim, words, mesh.shape, shape):
            raise AutoparError(
                f"torch cannot gather what lies as {tuple(words)} on {tuple(mesh.shape)} ranks: {shape[dim]} in dim {dim} are not cut into "
                "parts of one size. parallel.full_state_dict() has whole parameters"
            )
    for axis in reversed(range(mesh.ndim)):
        word: Any = words[axis]
        if getattr(word, "dim", None) in wrong:
            part = _joined(part, mesh, axis, word.dim, getattr(word, "split_factor", 1))
            found[axis] = Replicate()
    return (part, found) if wrong else None


def is_cut_from_whole(words: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """Whether torch lays a tensor out so rightly from a whole one alone: other parts it cuts as if nothing split the dim beside."""
    return any(not is_pair and max(outer) > 1 for _, outer, is_pair in _splits(words, sizes))


def ranks_along(mesh: DeviceMesh, axis: int) -> list[int]:
    """The ranks of this one's group along an axis, in the order of the mesh: a process group has them sorted."""
    own = mesh.get_coordinate()
    assert own is not None, "a rank that is not of the mesh"
    index = tuple(slice(None) if each == axis else place for each, place in enumerate(own))
    return mesh.mesh[index].tolist()


def lies_in_equal_parts(tensor: DTensor) -> bool:
    """Whether each rank holds as much of `tensor` as any other: the same answer on all of them."""
    words, sizes = tensor.placements, tensor.device_mesh.shape
    return all(_is_even(dim, words, sizes, tensor.shape) for dim in {getattr(word, "dim", None) for word in words} if dim is not None)


def _joined(part: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int, outer: int) -> torch.Tensor:
    """The parts along an axis that splits `dim` inside each of its `outer` pieces, as one."""
    group = mesh.get_group(axis)
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(mesh.size(axis))]
    dist.all_gather(parts, part.contiguous(), group=group)
    of_rank = dict(zip(dist.get_process_group_ranks(group), parts, strict=True))
    pieces = [of_rank[rank].unflatten(dim, (outer, -1)) for rank in ranks_along(mesh, axis)]
    return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)


def _wrong_dims(words: Sequence[Any], sizes: Sequence[int]) -> set[int]:
    """Those that torch gathers wrongly, mostly without an error. Tried on torch 2.13: with several axes on one dim, unless all but the
    last are plain shards, or they are FSDP2's pair (a strided shard inside the pieces of the plain shard that follows). Torch 2.11
    gathers no strided shard but that pair's.
    """
    last = -1 if gathers_strided_shards() else None
    return {dim for dim, outer, is_pair in _splits(words, sizes) if not is_pair and max(outer[:last], default=1) > 1}


def _splits(words: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[int, list[int], bool]]:
    """Each dim that axes split, in how many pieces each of these splits inside, and whether they are FSDP2's pair."""
    for dim in {word.dim for word in words if word.is_shard() or hasattr(word, "split_factor")}:
        on_dim = [(word, size) for word, size in zip(words, sizes, strict=True) if getattr(word, "dim", None) == dim]
        outer = [getattr(word, "split_factor", 1) for word, _ in on_dim]
        yield dim, outer, len(on_dim) == 2 and outer == [on_dim[1][1], 1]


def _is_even(dim: int, words: Sequence[Any], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    left = shape[dim]
    for word, size in zip(words, sizes, strict=True):
        if getattr(word, "dim", None) == dim:
            if left % (size * getattr(word, "split_factor", 1)):
                return False
            left //= size
    return True
