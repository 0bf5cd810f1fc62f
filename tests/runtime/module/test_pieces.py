"""How views of split tensors lie: each rank's part of the view is what it has of the tensor, in the order of one device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from autopar.errors import AutoparError
from autopar.runtime._torch import shard
from autopar.runtime.module.pieces import pieces_of, words_of
from autopar.runtime.module.views import view_words


def part(whole: Tensor, words: Sequence[Any], sizes: Sequence[int], place: Sequence[int]) -> Tensor:
    """What the rank at `place` of a mesh has, axis by axis as DTensor cuts."""
    for word, size, index in zip(words, sizes, place, strict=True):
        if (dim := getattr(word, "dim", None)) is not None:
            pieces = whole.unflatten(dim, (getattr(word, "split_factor", 1), size, -1))
            whole = pieces.select(dim + 1, index).flatten(dim, dim + 1)
    return whole


def random_words(generator: random.Random, sizes: Sequence[int], shape: Sequence[int]) -> list[Any]:
    words, left = list[Any](), list(shape)
    for size in sizes:
        dim, outer = generator.randrange(len(shape)), generator.choice([1, 1, 2, 3, 4])
        is_split = generator.random() < 0.8 and left[dim] % (size * outer) == 0
        words.append(shard(dim, outer) if is_split else Replicate())
        left[dim] //= size if is_split else 1
    return words


def random_shape(generator: random.Random, numel: int) -> list[int]:
    shape, left = list[int](), numel
    for _ in range(3):
        shape.append(generator.choice([each for each in range(1, left + 1) if left % each == 0]))
        left //= shape[-1]
    shape[0] *= left
    generator.shuffle(shape)
    return shape


def test_views_lie_as_their_words_say_on_every_rank() -> None:
    generator, viewed, refused = random.Random(0), 0, 0
    for _ in range(1500):
        sizes = [generator.choice([1, 2, 2, 3]) for _ in range(generator.randint(1, 3))]
        shape = [generator.choice([1, 2, 3, 4, 6, 8, 12, 24]) for _ in range(generator.randint(1, 3))]
        words, new_shape = random_words(generator, sizes, shape), random_shape(generator, prod(shape))
        whole, places = torch.arange(prod(shape)).view(shape), list(itertools.product(*map(range, sizes)))
        pieces = pieces_of(words, sizes, shape)
        same = words if pieces is None else words_of(pieces, len(sizes))
        assert all(torch.equal(part(whole, same, sizes, each), part(whole, words, sizes, each)) for each in places), (words, sizes, shape)
        try:
            found = view_words(words, sizes, shape, new_shape, ())
        except AutoparError:
            refused += 1
            continue
        for place in places if found is not None else ():
            mine = part(whole.view(new_shape), found or (), sizes, place), part(whole, words, sizes, place)
            assert torch.equal(mine[0].flatten(), mine[1].flatten()), (words, sizes, shape, new_shape, found)
        viewed += found is not None
    assert viewed > 1000 and refused > 50


def test_a_view_across_the_parts_says_what_to_do() -> None:
    with pytest.raises(AutoparError, match=r"a view of \[24\] as \[4, 6\].*full_tensor\(\)"):
        view_words([shard(0, 3)], [2], [24], [4, 6], ())
    assert view_words([shard(0, 3)], [2], [24], [6, 4], ()) == [shard(0, 3)]
    assert view_words([shard(1, 3), Replicate()], [2, 2], [4, 12], [48], ()) == [shard(0, 12), Replicate()]


def test_unequal_parts_of_pieces_are_viewed_as_a_dim() -> None:
    assert view_words([Replicate(), shard(0, 6)], [2, 2], [18], [6, 3, 1], ()) == [Replicate(), Shard(1)]
    with pytest.raises(AutoparError, match="cuts across"):
        view_words([Replicate(), shard(0, 6)], [2, 2], [18], [3, 6], ())
