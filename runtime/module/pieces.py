"""How dims lie on a mesh: each as its pieces, major first, of which an axis of the mesh indexes some; and DTensor's words for that.

DTensor splits a dim axis by axis, in the order of the mesh, each time what one rank has left of it: a strided shard inside each of its
`split_factor` outer pieces. 24 that axis 0, of 2 ranks, splits inside 3 pieces lie as [(3, None), (2, 0), (4, None)].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.tensor import Placement, Replicate

from autopar.runtime._torch import shard

# A size, and the axis that indexes it, None for what each rank has whole.
Piece = tuple[int, int | None]


def words_of(dims: Iterable[Sequence[Piece]], num_axes: int) -> list[Placement]:
    """DTensor's words for dims of these pieces, one per axis of the mesh. An axis that comes after whole pieces of its dim, or after an
    axis that DTensor splits later, is a strided shard."""
    left = [list(pieces) for pieces in dims]
    found: list[Placement] = []
    for axis in range(num_axes):
        words: Placement = Replicate()
        for dim, pieces in enumerate(left):
            position = next((i for i, (_, name) in enumerate(pieces) if name == axis), None)
            if position is not None:
                outer = 1
                for size, _ in pieces[:position]:
                    outer *= size
                words = shard(dim, outer)
                del pieces[position]
        found.append(words)
    return found


def pieces_of(words: Sequence[Any], sizes: Sequence[int], shape: Sequence[int]) -> list[list[Piece]] | None:
    """The pieces of each dim of a tensor that lies so on a mesh of these `sizes`; None where parts are not as large as each other, or an
    axis splits what another one lies within."""
    dims: list[list[Piece]] = [[(size, None)] for size in shape]
    for axis, (word, size) in enumerate(zip(words, sizes, strict=True)):
        dim = getattr(word, "dim", None)
        if dim is None or not (word.is_shard() or hasattr(word, "split_factor")):
            continue
        cut = _cut(dims[dim], axis, size, getattr(word, "split_factor", 1))
        if cut is None:
            return None
        dims[dim] = cut
    return dims


def viewed(dims: Sequence[Sequence[Piece]], shape: Sequence[int]) -> list[list[Piece]] | None:
    """The pieces of a view of another shape; None where one that an axis indexes would reach over two dims, or parts would be unequal."""
    left = list[Piece]()
    for own, axis in (piece for pieces in dims for piece in pieces):
        is_joined = axis is None and bool(left) and left[-1][1] is None
        left[-1:] = [(left[-1][0] * own, None)] if is_joined else [*left[-1:], (own, axis)]
    found: list[list[Piece]] = []
    for size in shape:
        taken = list[Piece]()
        while size > 1:
            if not left:
                return None
            own, axis = left.pop(0)
            if size % own:
                if axis is not None or own % size:
                    return None
                left.insert(0, (own // size, None))
                own = size
            taken.append((own, axis))
            size //= own
        found.append(taken)
    return found if all(own == 1 for own, _ in left) else None


def _cut(pieces: Sequence[Piece], axis: int, size: int, outer: int) -> list[Piece] | None:
    """These pieces where `axis` splits what is whole of them, inside its `outer` pieces."""
    found = list[Piece]()
    for place, (own, index) in enumerate(pieces):
        if index is not None or own == 1 or (outer > 1 and outer % own == 0):
            found.append((own, index))
            outer //= own if index is None else 1
        elif own % (outer * size) == 0:
            before: list[Piece] = [(outer, None)] if outer > 1 else []
            return [*found, *before, (size, axis), (own // (outer * size), None), *pieces[place + 1 :]]
        else:
            return None
    return found if size == 1 else None
