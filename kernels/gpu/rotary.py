"""Triton kernel of `autopar::rotary` and its backward: see `autopar/kernels/rotary.py` for what it computes.

A program turns BLOCK_ROWS heads: every pair of elements is read once and written once, and the untouched tail is copied.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.registration import launch

TILE_ELEMENTS = 2048


@triton.jit
def rotary_rows(
    x, cos, sin, out, rows, heads, length,
    x_batch, x_head, x_position, cos_batch, cos_head, cos_position, sin_batch, sin_head, sin_position,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    head = row % heads
    position = (row // heads) % length
    batch = row // heads // length
    x += batch * x_batch + head * x_head + position * x_position
    cos += batch * cos_batch + head * cos_head + position * cos_position
    sin += batch * sin_batch + head * sin_head + position * sin_position
    out += row * SIZE
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    inside = (row < rows) & (pair < ROTATED // 2)
    first = 2 * pair if INTERLEAVED else pair
    second = 2 * pair + 1 if INTERLEAVED else pair + ROTATED // 2
    x_1 = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    x_2 = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
    cos_1 = tl.load(cos + first, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + second, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + first, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + second, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        out_1 = x_1 * cos_1 + x_2 * sin_2
        out_2 = x_2 * cos_2 - x_1 * sin_1
    else:
        out_1 = x_1 * cos_1 - x_2 * sin_1
        out_2 = x_2 * cos_2 + x_1 * sin_2
    tl.store(out + first, out_1.to(out.dtype.element_ty), mask=inside)
    tl.store(out + second, out_2.to(out.dtype.element_ty), mask=inside)
    if ROTATED < SIZE:
        tail = ROTATED + tl.arange(0, BLOCK_TAIL)[None, :]
        inside = (row < rows) & (tail < SIZE)
        tl.store(out + tail, tl.load(x + tail, mask=inside), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, backward: bool) -> Tensor:
    """x [B, H, S, D] turned by cos and sin, which broadcast to [B, H, S, R]; the result lies as [B, S, H, D]."""
    batch, heads, length, size = x.shape
    rotated = cos.shape[-1]
    x, cos, sin = (item if item.stride(-1) == 1 else item.contiguous() for item in (x, cos, sin))
    cos, sin = (item.expand(batch, heads, length, rotated) for item in (cos, sin))
    out = x.new_empty((batch, length, heads, size))
    rows = batch * length * heads
    pairs, tail = triton.next_power_of_2(rotated // 2), triton.next_power_of_2(max(size - rotated, 1))
    block_rows = max(TILE_ELEMENTS // (2 * pairs), 1)
    strides = (*x.stride()[:3], *cos.stride()[:3], *sin.stride()[:3])
    launch(
        rotary_rows, (triton.cdiv(rows, block_rows),), x, cos, sin, out, rows, heads, length, *strides,
        SIZE=size, ROTATED=rotated, INTERLEAVED=interleaved, BACKWARD=backward,
        BLOCK_ROWS=block_rows, BLOCK_PAIRS=pairs, BLOCK_TAIL=tail, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)
