"""From measured ops to the few numbers of a device, by least squares of relative errors.

    seconds = FLOPs / rate + bytes read and written / bandwidth + launch

is how nodes are priced (`autopar.cost.model`). It is linear in (1/rate, 1/bandwidth, launch), none of which may be negative. Fitted on
products and pointwise ops of the sizes that networks have, each into new memory as a program runs them: a copy of a large block and a
product of large squares alone say what a device can do at best, which no step reaches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from autopar.cost.hardware.link_fit import least_ratios

# Rows, inner size and columns of products: what projections and MLPs of narrow and wide models do with few and with many tokens, and the
# products of their backward.
PRODUCTS = (
    (128, 128, 128), (128, 128, 512), (512, 128, 128), (64, 768, 768), (64, 768, 3072), (3072, 64, 768), (768, 128, 768), (256, 512, 2048),
    (2048, 256, 512), (1024, 512, 512), (1024, 512, 2048), (1024, 1024, 1024),
)  # fmt: skip
# Rows and columns of what pointwise ops and norms run over.
ROWS = ((1, 8), (16, 8), (16, 128), (128, 128), (64, 768), (128, 512), (64, 3072), (256, 2048), (1024, 512), (1024, 2048))
_ROUNDS = 24
# Ops between two of these move bytes enough alike to be of one network.
_LIKE = (1 << 20, 4 << 20)


@dataclass(frozen=True)
class Trial:
    """One op: what it does on paper, and the seconds it took."""

    flops: float
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class Rates:
    """FLOP/s of products, bytes a second, and seconds of a call."""

    flops: float
    memory_bandwidth: float
    launch_seconds: float

    def seconds(self, trial: Trial) -> float:
        return trial.flops / self.flops + trial.num_bytes / self.memory_bandwidth + self.launch_seconds


def fit_rates(trials: Sequence[Trial]) -> Rates | None:
    """What explains `trials`; None where products or bytes would have to take no time."""
    matrix = np.array([(each.flops, each.num_bytes, 1.0) for each in trials])
    found = least_ratios(matrix, np.array([each.seconds for each in trials]), needed=(0, 1))
    return None if found is None else Rates(1 / float(found[0]), 1 / float(found[1]), float(found[2]))


def run_trials(dtype: torch.dtype, device: torch.device, rank: int = 0) -> list[Trial]:
    """Every op of `PRODUCTS` and `ROWS` in turn, one call at a time, so that each finds in the caches what the others left there, as in a
    program, where ops follow those of like size; the mean of `_ROUNDS` but for the slowest. Each rank has another order in each round, so
    that an op meets those of other ranks as often as it takes of their time. In every other round all results are kept until its end, as a
    forward keeps what the backward reads, and memory is new; in the others they are let go at once, as those of a backward are, and memory
    is what was just given back."""
    ops = [*_products(dtype, device), *_pointwise(dtype, device)]
    seconds: dict[tuple[_Op, bool], list[float]] = {(op, keeps): [] for op in ops for keeps in (False, True)}
    order, kept = random.Random(rank), list[Any]()
    for number in range(_ROUNDS + 2):  # the first of each kind warms up
        for op in _shuffled(ops, order):
            start = time.perf_counter()
            result = op.run()
            seconds[op, number % 2 == 1].append(time.perf_counter() - start)
            kept += [result] if number % 2 else []
            del result
        kept.clear()
    return [Trial(op.flops, op.num_bytes, mean(_typical(seconds[op, keeps]) for keeps in (False, True))) for op in ops]


def _shuffled(ops: Sequence[_Op], order: random.Random) -> Iterator[_Op]:
    """By size, sizes and the ops of each in any order."""
    for size in order.sample(range(len(_LIKE) + 1), len(_LIKE) + 1):
        alike = [op for op in ops if sum(op.num_bytes > limit for limit in _LIKE) == size]
        yield from order.sample(alike, len(alike))


def _typical(row: Sequence[float]) -> float:
    """The mean but for the first and the slowest."""
    return mean(sorted(row[1:])[: -max(len(row) // 8, 1)])


@dataclass(frozen=True, eq=False)
class _Op:
    flops: float
    num_bytes: float
    run: Callable[[], Any]


def _products(dtype: torch.dtype, device: torch.device) -> Iterator[_Op]:
    for rows, inner, columns in PRODUCTS:
        left, right = torch.ones(rows, inner, dtype=dtype, device=device), torch.ones(inner, columns, dtype=dtype, device=device)
        moved = (left.numel() + right.numel() + rows * columns) * dtype.itemsize
        yield _Op(2.0 * rows * inner * columns, moved, partial(torch.mm, left, right))


def _pointwise(dtype: torch.dtype, device: torch.device) -> Iterator[_Op]:
    """Each with a value of its own."""
    for rows, columns in ROWS:
        one, other, third, fourth, fifth = (torch.full((rows, columns), 0.5, dtype=dtype, device=device) for _ in range(5))
        yield _Op(0.0, 3 * one.nbytes, partial(torch.add, one, other))
        yield _Op(0.0, 2 * one.nbytes, partial(F.gelu, third))
        yield _Op(0.0, 2 * one.nbytes, partial(torch.layer_norm, fourth, (columns,)))
        yield _Op(0.0, one.nbytes, partial(torch.sum, fifth, 0))
