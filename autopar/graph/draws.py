"""Random numbers as plain integer ops, keyed by (seed, step, site, logical position).

A position's draw depends on nothing but its key, so a rank that holds a part of a tensor computes that part of the
draws, and recomputing gives the same ones. Positions come from one `arange` per dim; splitting the dim slices the `arange`.

    stir(x, C) = (y ^ y >> 32) mod 2³²  where y = x · C      a product, its upper half folded into its lower one
    mix(x)     = stir(stir(stir(x, C1), C2), C3)
    words      = mix(mix(arange(2 · sites) ^ low) ^ high)    two 32-bit words (a, b) per site, once per step
    draw       = stir(stir(a + index, C1) ^ b, C2) · C3 mod 2³²

Everything is int64 and no product reaches 2⁶³: signed overflow is undefined in the C++ that Inductor writes. The second word
enters half-way because two sites whose first words lie close walk over the same sums. Two products instead of three
left neighbours correlated under some keys (up to 31 standard deviations in 2²⁰ draws; three: 3.5 in 2,700 trials, as chance has it).
The factors are from Wellons' search for 32-bit hashes ("Prospecting for hash functions", 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from autopar.graph.emit import Emitter, tensor_of

aten = torch.ops.aten

_MASK_32 = (1 << 32) - 1
# That one word tells apart.
_MOST_POSITIONS = 1 << 32
# Below 2³⁰ (it multiplies a sum, up to 2³³), 2³¹ and 2³⁰.
_FACTORS = (0x21F0AAAD, 0x735A2D97, 0x31848BAB)
# Bits of a draw that a dtype can hold without rounding up to 1.
_DIGITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# What is drawn is rounded to at most 32 binary digits.
_LARGEST_BELOW_1 = {torch.float64: 1.0 - 2.0**-33, torch.float32: 1.0 - 2.0**-24}
MOST_INTEGERS = 1 << 31


class Draws:
    """The draws of one graph: `num_sites` independent streams of numbers, derived from the int64 0-d value of `key`.

    The words of all sites are emitted at the head of the graph, so that equal layers stay equal.
    """

    def __init__(self, graph: Graph, key: Node, num_sites: int) -> None:
        self._head = next(node for node in graph.nodes if node.op != "placeholder")
        emit = Emitter(graph, self._head, like=key)
        low = emit.call(aten.bitwise_and.Scalar, key, _MASK_32)
        high = emit.call(aten.bitwise_right_shift.Tensor_Scalar, key, 32)
        index = emit.call(aten.arange.default, 2 * num_sites, device=tensor_of(key).device)
        mixed = _mix(emit, emit.call(aten.bitwise_xor.Tensor, index, low))
        mixed = _mix(emit, emit.call(aten.bitwise_xor.Tensor, mixed, high))
        self._words = [
            (emit.call(aten.select.int, mixed, 0, 2 * site), emit.call(aten.select.int, mixed, 0, 2 * site + 1))
            for site in range(num_sites)
        ]
        self._num_taken = 0

    def begin(self, site: int) -> None:
        """The next draws are those of site number `site` on."""
        self._num_taken = site

    def bits(self, emit: Emitter, shape: Sequence[int]) -> Node:
        """Integers in [0, 2**32) of `shape`, int64, from the next site."""
        first, second, lead = self._site(emit, shape)
        value = _linear_index(emit, first, shape, range(lead, len(shape)))
        value = emit.call(aten.bitwise_xor.Tensor, _stir(emit, value, _FACTORS[0]), second)
        value = _stir(emit, value, _FACTORS[1])
        return emit.call(aten.bitwise_and.Scalar, emit.call(aten.mul.Tensor, value, _FACTORS[2]), _MASK_32)

    def positions(self, emit: Emitter, shape: Sequence[int]) -> tuple[Node, Node, Node]:
        """What `bits` of `shape` is made of, for ops that draw by themselves (`autopar/kernels/dropout.py`), from the next site.

        (rows, second, columns), int64: rows broadcast to [..., 1], second too, columns are [N]; a + index is rows + columns.
        """
        first, second, lead = self._site(emit, shape)
        rows = _linear_index(emit, first, (*shape[:-1], 1), range(lead, len(shape) - 1), inner=shape[-1])
        return rows, second, emit.call(aten.arange.default, shape[-1], device=torch.device("cpu"))

    def strided_positions(
        self, emit: Emitter, shape: Sequence[int], strides: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[Node, Node, Node]:
        """As `positions`, in another order: see `Site`. Of at most 2**32 positions."""
        assert math.prod(shape) <= _MOST_POSITIONS, shape
        first, second, _ = self._site(emit, shape)
        *rows, columns = (_strided_index(emit, parts) for parts in strides)
        total = first
        for dim, index in enumerate(rows):
            sizes = [shape[dim] if other == dim else 1 for other in range(len(shape))]
            total = emit.call(aten.add.Tensor, total, emit.call(aten.view.default, index, sizes))
        return total, second, columns

    def mask(self, emit: Emitter, shape: Sequence[int], probability: float) -> Node:
        """Bools of `shape`, true with `probability` (to 2**-32)."""
        return emit.call(aten.lt.Scalar, self.bits(emit, shape), round(probability * 2**32))

    def uniform(self, emit: Emitter, shape: Sequence[int], dtype: torch.dtype) -> Node:
        """Numbers in [0, 1) of `shape` and floating `dtype`, at most 32 binary digits of each."""
        digits = _DIGITS[dtype]
        draw = self.bits(emit, shape)
        if digits < 32:
            draw = emit.call(aten.bitwise_right_shift.Tensor_Scalar, draw, 32 - digits)
        return emit.call(aten.mul.Tensor, emit.cast(draw, dtype), 2.0**-digits)

    def normal(self, emit: Emitter, shape: Sequence[int], dtype: torch.dtype) -> Node:
        """Standard normal numbers by Box and Muller (1958), from two sites. The largest is 6.7 in magnitude."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        radius = emit.call(aten.log.default, emit.call(aten.mul.Tensor, emit.cast(self._positive(emit, shape), exact), 2.0**-32))
        radius = emit.call(aten.sqrt.default, emit.call(aten.mul.Tensor, radius, -2.0))
        angle = emit.call(aten.mul.Tensor, self.uniform(emit, shape, exact), 2.0 * math.pi)
        return emit.cast(emit.call(aten.mul.Tensor, radius, emit.call(aten.cos.default, angle)), dtype)

    def exponential(self, emit: Emitter, shape: Sequence[int], dtype: torch.dtype) -> Node:
        """Exponential numbers of rate 1, at most 22.2, and above 0: they are divided by, and their logarithms taken."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        uniform = emit.call(aten.mul.Tensor, emit.cast(self._positive(emit, shape), exact), 2.0**-32)
        # float32 rounds the largest 128 words to 1.
        uniform = emit.call(aten.clamp_max.default, uniform, _LARGEST_BELOW_1[exact])
        return emit.cast(emit.call(aten.neg.default, emit.call(aten.log.default, uniform)), dtype)

    def integer(self, emit: Emitter, shape: Sequence[int], low: int, high: int) -> Node:
        """Integers in [low, high), int64; the range must be at most `MOST_INTEGERS` wide."""
        assert 0 < high - low <= MOST_INTEGERS, f"a range of {high - low} integers"
        scaled = emit.call(aten.mul.Tensor, self.bits(emit, shape), high - low)
        return emit.call(aten.add.Tensor, emit.call(aten.bitwise_right_shift.Tensor_Scalar, scaled, 32), low)

    def _site(self, emit: Emitter, shape: Sequence[int]) -> tuple[Node, Node, int]:
        """The two words of the next site, and how many leading dims of `shape` they vary along."""
        first, second = self._words[self._num_taken]
        self._num_taken += 1
        lead = _num_lead_dims(shape)
        if lead:
            # More than 2³² positions: the leading dims change the words, the trailing dims walk along them.
            row = _linear_index(emit, None, shape, range(lead))
            first, second = (_mix(emit, emit.call(aten.bitwise_xor.Tensor, row, word)) for word in (first, second))
        return first, second, lead

    def _positive(self, emit: Emitter, shape: Sequence[int]) -> Node:
        """Integers in [1, 2**32]: their logarithm is finite."""
        return emit.call(aten.add.Tensor, self.bits(emit, shape), 1)


def _num_lead_dims(shape: Sequence[int]) -> int:
    """How many leading dims stay outside the longest run of trailing dims with at most 2³² positions."""
    lead = len(shape)
    while lead and math.prod(shape[lead - 1 :]) <= _MOST_POSITIONS:
        lead -= 1
    assert math.prod(shape[:lead]) <= _MOST_POSITIONS, f"{tuple(shape)} has more positions than two words of 32 bits tell apart"
    return lead


def _linear_index(emit: Emitter, start: Node | None, shape: Sequence[int], dims: range, inner: int = 1) -> Node:
    """`start` + `inner` · the linear index along `dims`, with size 1 in the other dims.

    Outer dims first: only the last sum is of full size.
    """
    total = start
    for dim in dims:
        if shape[dim] == 1:
            continue
        stride = inner * math.prod(shape[dim + 1 : dims.stop])
        index = emit.call(aten.arange.default, shape[dim], device=torch.device("cpu"))
        if stride != 1:
            index = emit.call(aten.mul.Tensor, index, stride)
        index = emit.call(aten.view.default, index, [shape[dim] if other == dim else 1 for other in range(len(shape))])
        total = index if total is None else emit.call(aten.add.Tensor, total, index)
    if total is None:
        return emit.call(aten.zeros.default, [1] * len(shape), dtype=torch.int64, device=torch.device("cpu"))
    return total if tensor_of(total).ndim == len(shape) else emit.call(aten.view.default, total, [1] * len(shape))


def _strided_index(emit: Emitter, parts: Sequence[tuple[int, int]]) -> Node:
    """The sum over `parts`, (size, stride) outermost first, of index times stride: one dim."""
    total = emit.call(aten.zeros.default, [1] * max(len(parts), 1), dtype=torch.int64, device=torch.device("cpu"))
    for place, (size, stride) in enumerate(parts):
        index = emit.call(aten.mul.Tensor, emit.call(aten.arange.default, size, device=torch.device("cpu")), stride)
        sizes = [size if other == place else 1 for other in range(len(parts))]
        total = emit.call(aten.add.Tensor, total, emit.call(aten.view.default, index, sizes))
    return emit.call(aten.reshape.default, total, [-1])


def _stir(emit: Emitter, value: Node, factor: int) -> Node:
    product = emit.call(aten.mul.Tensor, value, factor)
    folded = emit.call(aten.bitwise_xor.Tensor, product, emit.call(aten.bitwise_right_shift.Tensor_Scalar, product, 32))
    return emit.call(aten.bitwise_and.Scalar, folded, _MASK_32)


def _mix(emit: Emitter, value: Node) -> Node:
    """All 32 bits of `value` over all 32 bits of the result."""
    for factor in _FACTORS:
        value = _stir(emit, value, factor)
    return value
