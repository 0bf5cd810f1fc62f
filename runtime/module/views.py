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
    if any(hasattr(word, "split_factor") and word.dim not in kept for word in words):
        raise AutoparError(
            f"a view of {list(shape)} as {list(new_shape)} cuts across the parts of what lies as {tuple(words)} on {tuple(sizes)} ranks: "
            "take .full_tensor() of it first, on every rank, or a shape that keeps each split dim apart, or a multiple of its parts"
        )
    return None
