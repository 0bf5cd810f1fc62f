"""What the attention kernels share: the scores of a tile with their masks, what dropout keeps of them, loads of rows.

Scores are in units of log 2, so that exponentials are `exp2`, one instruction; with an added mask they are as they are, since the
lowest number would be −inf in those units, and a row of nothing else weighs its keys alike. `s` and `t` are positions of queries and
keys, of shapes that broadcast to the tile in whichever orientation a kernel has it.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.gpu.dropout import FIRST_FACTOR, drawn_of

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
def load_products(start, position, stride, length, DROPS: tl.constexpr):
    """Of rows or of columns, int64, at `position`: C1 times them, 0 outside; without DROPS just anything of their shape.

    C1 · (row + column) is the sum of the two products: taken once a row and once a column, they leave a score one addition of 64 bits.
    """
    found = position
    if DROPS:
        found = tl.load(start + position * stride, mask=position < length, other=0) * FIRST_FACTOR
    return found


@triton.jit
def load_words(second, position, stride, length, DROPS: tl.constexpr):
    """The words of 32 bits at `position`: one for all of them where DROPS is 1, one each where it is 2."""
    found = position
    if DROPS == 1:
        found = tl.broadcast_to(tl.load(second).to(tl.uint32), position.shape)
    if DROPS == 2:
        found = tl.load(second + position * stride, mask=position < length, other=0).to(tl.uint32)
    return found


@triton.jit
def kept(row, word, column, keep_scale, LARGEST_KEPT: tl.constexpr):
    """What dropout multiplies probabilities by, 0 or `keep_scale`, from the products of their rows and columns, and words of their rows.

    To be multiplied by, not chosen by: what is dropped of an infinity is no number, as in plain ops.
    """
    return tl.where(drawn_of(row + column, word) <= LARGEST_KEPT, keep_scale, 0.0)


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
    """Scores with their mask, in the units said above; −inf where s does not attend to t. Without EDGE all positions of the tile do.

    `document_s` and `document_t` are the ids of the documents of s and t, anything without DOCUMENTS.
    """
    if MASK == 2:
        inside = (s < length) & (t < key_length)
        score += tl.load(mask + s * mask_s + t * mask_t, mask=inside, other=0.0).to(tl.float32)
    else:
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
