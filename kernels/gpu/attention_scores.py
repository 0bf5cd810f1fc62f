"""What the attention kernels share: the scores of a tile with their masks, loads of rows.

Scores are in units of log 2, so that exponentials are `exp2`, one instruction. `s` and `t` are positions of queries and keys, of
shapes that broadcast to the tile in whichever orientation a kernel has it.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.gpu.attention_documents import bounds
from autopar.kernels.gpu.attention_tiles import DOCUMENTS

NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """Exact to float32's rounding near 0, too, where (1 − e) / (1 + e) cancels."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0.0, -far, far))


@triton.jit
def load_rows(start, row, stride, column, num_rows, num_columns, BLOCK_COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """start[row, column], 0 outside; `row` and `column` broadcast to the tile."""
    if SIZE == BLOCK_COLUMNS:
        return tl.load(start + row * stride + column, mask=row < num_rows, other=0.0)
    return tl.load(start + row * stride + column, mask=(row < num_rows) & (column < num_columns), other=0.0)


@triton.jit
def load_ids(documents, position, length, DOCUMENTS: tl.constexpr):
    """The ids of the documents at `position`, 0 outside; without DOCUMENTS just anything of their shape."""
    found = position
    if DOCUMENTS:
        found = tl.load(documents + position, mask=position < length, other=0)
    return found


@triton.jit
def capped(products, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """scale · QKᵀ, soft-capped: cap · tanh(scale · QKᵀ / cap)."""
    score = products * scale
    if SOFT_CAP:
        score = soft_cap * tanh(score / soft_cap)
    return score


@triton.jit
def masked(
    score, s, t, document_s, document_t, mask, mask_s, mask_t, length, key_length, window,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores with their mask, in units of log 2; −inf where s does not attend to t. Without EDGE all positions of the tile do.

    `document_s` and `document_t` are the ids of the documents of s and t, anything without DOCUMENTS.
    """
    if MASK == 2:
        inside = (s < length) & (t < key_length)
        score += tl.load(mask + s * mask_s + t * mask_t, mask=inside, other=0.0).to(tl.float32)
    score *= LOG2_E
    if MASK == 1:
        inside = (s < length) & (t < key_length)
        score = tl.where(tl.load(mask + s * mask_s + t * mask_t, mask=inside, other=0) != 0, score, float("-inf"))
    if EDGE:
        attends = t < key_length
        if CAUSAL:
            attends = attends & (t <= s)
        if WINDOW:
            attends = attends & (s - t < window) & (t - s < window)
        if DOCUMENTS:
            attends = attends & (document_s == document_t)
        score = tl.where(attends, score, float("-inf"))
    return score


@dataclass(frozen=True)
class Masks:
    """What is not the tensors: mask, keep, predicates, scale, ids of documents; how kernels are told of them."""

    mask: Tensor | None
    keep: Tensor | None
    is_causal: bool
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None

    @property
    def kind(self) -> int:
        return NO_MASK if self.mask is None else BOOL_MASK if self.mask.dtype == torch.bool else ADDED_MASK

    def crowding(self, *sizes: int) -> int:
        """What else takes registers of a tile: 0 nothing, 1 a mask or heads whose `sizes` do not fill the tile, 2 two masks,
        3 documents, 4 documents and a mask."""
        if self.query_documents is not None:
            return DOCUMENTS + int(self.mask is not None or self.keep is not None or self.soft_cap > 0.0)
        if self.mask is not None and self.keep is not None:
            return 2
        masked = self.mask is not None or self.keep is not None or self.window > 0 or self.soft_cap > 0.0
        return int(masked or any(size != block_of(size) for size in sizes))

    def flags(self) -> dict[str, bool | int]:
        return {
            "MASK": self.kind,
            "KEEP": self.keep is not None,
            "CAUSAL": self.is_causal,
            "WINDOW": self.window > 0,
            "SOFT_CAP": self.soft_cap > 0.0,
            "DOCUMENTS": self.query_documents is not None,
        }

    def ids(self, query: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The ids of documents of queries and of keys, and how far the next sample's lie; `query` and 0 where there are none."""
        if self.query_documents is None or self.key_documents is None:
            return (query, query), (0, 0)
        of_query, of_key = self.query_documents.contiguous(), self.key_documents.contiguous()
        return (of_query, of_key), (_sample_stride(of_query), _sample_stride(of_key))

    def bounds(self, queries: int, keys: int, query: Tensor, of_keys: bool = False) -> tuple[Tensor, int]:
        """Where each tile of queries starts and ends its walk over the keys (`of_keys`: of keys, over the queries), and how far the next
        sample's lie; `query` and 0 where there are no documents."""
        if self.query_documents is None or self.key_documents is None:
            return query, 0
        own, others = (self.query_documents, queries), (self.key_documents, keys)
        own, others = (others, own) if of_keys else (own, others)
        found = bounds(*own, *others)
        return found, _sample_stride(found)


def _sample_stride(value: Tensor) -> int:
    """What lies between two samples of a contiguous tensor, 0 where one is for all of them."""
    return value.stride(0) if value.shape[0] > 1 else 0


def strides_of(value: Tensor | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if value is None else value.stride()  # type: ignore[return-value]


def require_addressable(*values: Tensor | None) -> None:
    """Raises ValueError where a sample's rows reach beyond what the kernels' 32-bit offsets address."""
    for value in values:
        if value is not None and value.shape[-2] * abs(value.stride(-2)) >= 2**31:
            reach = value.shape[-2] * abs(value.stride(-2))
            raise ValueError(f"the rows of one sample of {tuple(value.shape)} span {reach} elements; attention's kernels address 2**31")


def rows_contiguous(value: Tensor) -> Tensor:
    """Kernels read along the last dim without a stride."""
    return value if value.stride(-1) == 1 else value.contiguous()


def block_of(size: int) -> int:
    """The columns of a tile that holds heads of `size`: matrix instructions want powers of two, 16 or more."""
    return max(triton.next_power_of_2(size), 16)


def precision_of(value: Tensor) -> str:
    """How products of float32 are taken: as accurate as float32, on matrix units where the device has a way to."""
    return "ieee" if value.dtype != torch.float32 or torch.version.hip is not None else "tf32x3"
