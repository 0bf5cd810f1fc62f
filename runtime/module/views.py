"""How views of what lies on processes lie (`p.flatten()`, `p.view(...)`, `p.grad.view(-1)`), where torch's own rule gives their elements
in another order: what an axis splits inside the pieces of a dim, and that is not the first of the dims merged.

Torch 2.13 keeps the number of pieces then, and leaves out those that the dims before make, mostly without an error: `parameters_to_vector`
would be another vector than of one device. Here a view is in the order of one device, and shows the memory of the parameter, as there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

from torch.distributed.tensor import Placement

from autopar.errors import AutoparError
from autopar.runtime._torch import shard
from autopar.runtime.module.pieces import pieces_of, viewed, words_of


def view_words(
    words: Sequence[Any], sizes: Sequence[int], shape: Sequence[int], new_shape: Sequence[int], kept: Collection[int]
) -> Sequence[Placement] | None:
    """How a view of another shape lies, of what lies as `words` say on a mesh of these `sizes`; None where torch's own rule is right.
    The dims `kept` are neither merged nor cut.

    Raises `AutoparError` where no words say it, and torch's rule cannot be trusted.
    """
    numel = prod(shape)
    if numel and numel == prod(new_shape):
        before = pieces_of(words, sizes, shape)
        after = None if before is None else viewed(before, new_shape)
        if after is not None:
            found = words_of(after, len(sizes))
            return [word if getattr(word, "dim", None) is None else found[axis] for axis, word in enumerate(words)]
        at_pieces = _at_pieces(words, shape, new_shape)
        if at_pieces is not None:
            return at_pieces
    if any(hasattr(word, "split_factor") and word.dim not in kept for word in words):
        raise AutoparError(
            f"a view of {list(shape)} as {list(new_shape)} cuts across the parts of what lies as {tuple(words)} on {tuple(sizes)} ranks: "
            "take .full_tensor() of it first, on every rank, or a shape that keeps each split dim apart, or a multiple of its parts"
        )
    return None


def _at_pieces(words: Sequence[Any], shape: Sequence[int], new_shape: Sequence[int]) -> Sequence[Placement] | None:
    """How a view lies of what one axis alone splits inside the pieces of a dim, if a dim of the view is such a piece; parts may be unequal.

    torch's flatten() makes such pieces of unequal columns, which its backward views as columns again.
    """
    (word, *others) = [word for word in words if getattr(word, "dim", None) is not None] or [None]
    pieces = getattr(word, "split_factor", 0)
    if others or not pieces or shape[word.dim] % pieces:
        return None
    before, size = prod(shape[: word.dim]) * pieces, shape[word.dim] // pieces
    dim = next((dim for dim, own in enumerate(new_shape) if own == size and prod(new_shape[:dim]) == before), None)
    return None if dim is None else [shard(dim, 1) if each is word else each for each in words]
