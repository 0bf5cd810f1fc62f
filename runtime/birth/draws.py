"""Random fills tile by tile: who holds a part of a tensor draws the tiles that the part meets, and no others.

a weight of [1024, 1024], of which a rank holds the first 600 rows: 4 tiles of 512 × 512, all drawn; of the first 512, two
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from autopar.runtime._torch import TorchDispatchMode, storage_key

# A side of a tile, and how long one of a vector is: a quarter of a million numbers take a millisecond.
SIDE, LENGTH = 512, 512 * 512
# For each dim the runs of indices that are wanted, as (start, end).
Ranges = Sequence[Sequence[tuple[int, int]]]
# By which Python gets a number, or the truth, of a tensor.
SCALAR = torch.ops.aten._local_scalar_dense.default
_FILLS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def seed_of(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])


@contextmanager
def drawing(key: str) -> Generator[None]:
    """While this is entered the generators of torch (CPU), numpy and Python draw what `key` says; then they are as before."""
    plain, arrays, seed = random.getstate(), numpy.random.get_state(), seed_of(key)
    with torch.random.fork_rng(devices=[]):
        try:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(plain)
            numpy.random.set_state(arrays)


@dataclass(frozen=True)
class Drawn:
    """A tensor that is filled tile by tile: `key` is where its draws begin, `wanted` what is needed of it (None: all)."""

    tensor: torch.Tensor
    key: str
    wanted: Ranges | None = None


class TiledFills(TorchDispatchMode):
    """While this is entered `normal_` and `uniform_` of all of one of these tensors fill it tile by tile, each tile a draw of its own, and
    leave tiles that nobody wants as they are. Of half-precision tensors they are drawn in float32 and rounded.

    What is on meta has the value 0 where Python asks for one: a loop that looks whether values are within bounds ends.
    """

    def __init__(self, tensors: Iterable[Drawn]) -> None:
        super().__init__()
        self._tensors = {storage_key(each.tensor): each for each in tensors}
        self._numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is SCALAR and args[0].is_meta:
            return nothing_of(args[0])
        if op in _FILLS and kwargs.get("generator") is None and (drawn := self._drawn(args[0])) is not None:
            self._fill(op, drawn, args, {name: value for name, value in kwargs.items() if name != "generator"})
            return args[0]
        return op(*args, **kwargs)

    def _drawn(self, tensor: torch.Tensor) -> Drawn | None:
        found = self._tensors.get(storage_key(tensor))
        return found if found is not None and tensor.shape == found.tensor.shape and tensor.is_floating_point() else None

    def _fill(self, op: Any, drawn: Drawn, args: Any, kwargs: dict[str, Any]) -> None:
        tensor, dtype = args[0], torch.promote_types(args[0].dtype, torch.float32)
        self._numbers[drawn.key] += 1
        for place in itertools.product(*_places(tensor.shape, drawn.wanted)):
            target = tensor[tuple(slice(start, end) for start, end in place)]
            generator = torch.Generator().manual_seed(seed_of(f"{drawn.key}/{self._numbers[drawn.key]}/{place}"))
            target.copy_(op(torch.empty(target.shape, dtype=dtype), *args[1:], **kwargs, generator=generator))


def nothing_of(tensor: torch.Tensor) -> bool | int | float | complex:
    """0 in the kind of number that `tensor` has."""
    return torch.zeros((), dtype=tensor.dtype, device="cpu").item()


def _places(shape: Sequence[int], wanted: Ranges | None) -> Iterator[list[tuple[int, int]]]:
    """For each dim its tiles, as (start, end)."""
    side = SIDE if len(shape) > 1 else LENGTH
    for size, ranges in zip(shape, wanted or [[(0, size)] for size in shape], strict=True):
        tiles = [(start, min(start + side, size)) for start in range(0, size, side)]
        yield [(start, end) for start, end in tiles if any(first < end and start < last for first, last in ranges)]
