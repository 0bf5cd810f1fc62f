"""Which elements of a tensor a part holds: for each dim runs of indices, and of all dims their product.

A rank's part of a fused projection [3 · 8, 4] whose rows are split over tp = 2 within each of the three:

    ranks         0 0 0 0 1 1 1 1 | 0 0 0 0 1 1 1 1 | 0 0 0 0 1 1 1 1
    rank 1 holds  (((4, 8), (12, 16), (20, 24)), ((0, 4),))            a [12, 4] tensor, run after run
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod

import numpy
import torch

# [start, stop) of each run of a dim, ascending; of all dims.
Runs = tuple[tuple[int, int], ...]
Slices = tuple[Runs, ...]
# More cells than this are no tiling that a mesh makes.
MAX_CELLS = 1 << 24


def whole(shape: Sequence[int]) -> Slices:
    return tuple(((0, size),) if size else () for size in shape)


def runs_of(indices: torch.Tensor) -> Runs:
    """Of ascending int64 indices."""
    if not indices.numel():
        return ()
    ends = ((indices.diff() != 1).nonzero().flatten() + 1).tolist()
    borders = [0, *ends, len(indices)]
    return tuple((int(indices[start]), int(indices[stop - 1]) + 1) for start, stop in pairwise(borders))


def shape_of(slices: Slices) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in runs) for runs in slices)


def problem_of(slices: Slices, shape: Sequence[int]) -> str:
    """Why these are no elements of a tensor of that shape; "" where they are."""
    if len(slices) != len(shape):
        return f"slices of {len(slices)} dims for {len(shape)}"
    for runs, size in zip(slices, shape, strict=True):
        borders = [border for run in runs for border in run]
        if any(first > second for first, second in pairwise((0, *borders, size))) or any(start == stop for start, stop in runs):
            return f"runs {[list(run) for run in runs][:4]} do not ascend within a dim of {size}"
    return ""


def tiling_problem(pieces: Sequence[Slices], shape: Sequence[int]) -> str:
    """Why these pieces, each without a problem of its own, do not hold each element once; "" where they do."""
    if len(pieces) == 1:
        return "" if prod(shape_of(pieces[0])) == prod(shape) else "elements are in no piece"
    if sum(prod(shape_of(each)) for each in pieces) != prod(shape):
        return "pieces overlap, or elements are in none"
    # In compressed coordinates: a dim has a cell between any two borders of runs that follow each other.
    places = [
        {
            border: place
            for place, border in enumerate(sorted({0, size} | {border for each in pieces for run in each[dim] for border in run}))
        }
        for dim, size in enumerate(shape)
    ]
    num_cells = [len(each) - 1 for each in places]
    if prod(num_cells) > MAX_CELLS:
        return f"they make {prod(num_cells)} cells"
    covered = numpy.zeros(num_cells, dtype=numpy.int32)
    for each in pieces:
        for box in product(*each):
            covered[tuple(slice(places[dim][start], places[dim][stop]) for dim, (start, stop) in enumerate(box))] += 1
    return "" if bool((covered == 1).all()) else "pieces overlap, or elements are in none"


def common(one: Runs, other: Runs) -> Iterator[tuple[int, int, int]]:
    """What both hold: where it begins in the one and in the other, counted in what each holds, and how long it is."""
    first, mine, second, theirs = 0, 0, 0, 0
    while first < len(one) and second < len(other):
        (start, stop), (begin, end) = one[first], other[second]
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield mine + low - start, theirs + low - begin, high - low
        if stop <= end:
            mine, first = mine + stop - start, first + 1
        if end <= stop:
            theirs, second = theirs + end - begin, second + 1


def copy(source: torch.Tensor, has: Slices, target: torch.Tensor, wants: Slices) -> None:
    """Into `target`, which holds `wants` of a tensor, what of it is in `source`, which holds `has`. Casts."""
    for boxes in product(*(list(common(mine, theirs)) for mine, theirs in zip(has, wants, strict=True))):
        read, written = source, target
        for dim, (begin, start, length) in enumerate(boxes):
            read, written = read.narrow(dim, begin, length), written.narrow(dim, start, length)
        written.copy_(read)


def are_apart(one: Slices, other: Slices) -> bool:
    """Whether no element is in both."""
    return any(next(common(mine, theirs), None) is None for mine, theirs in zip(one, other, strict=True))
