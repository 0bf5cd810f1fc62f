"""Triton kernel of `autopar::dropout` and `add_dropout`: see `autopar/kernels/dropout.py` for what they compute.

A tile of BLOCK elements a program, COLUMNS wide where there are rows enough. Of a draw only the position, a sum below 2³³, needs 64
bits; the rest are words of 32 bits and one product of two such: some 28 instructions an element in all, few enough for an A100 or
H100 to wait for memory instead.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.registration import launch

BLOCK = 2048
COLUMNS = 256
FIRST_FACTOR = tl.constexpr(0x21F0AAAD)


@triton.jit
def _drawn(position, second):
    """Words of 32 bits: the draws at `position`, int64, with the site's word `second`, int64."""
    return drawn_of(position * FIRST_FACTOR, second.to(tl.uint32))


@triton.jit
def drawn_of(product, second):
    """The draws of positions that were multiplied by the first factor, int64, with the site's word, 32 bits."""
    value = (product ^ (product >> 32)).to(tl.uint32) ^ second
    wide = value.to(tl.uint64) * 0x735A2D97
    return (wide ^ (wide >> 32)).to(tl.uint32) * 0x31848BAB


@triton.jit
def dropout_tiles(
    x, residual, rows, second, columns, out, num_rows, num_columns, second_stride, scale,
    LARGEST_KEPT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles_across = tl.cdiv(num_columns, BLOCK_COLUMNS)
    row = (tl.program_id(0) // tiles_across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tl.program_id(0) % tiles_across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row, is_column = row < num_rows, column < num_columns
    inside = is_row[:, None] & is_column[None, :]
    where = row[:, None] * num_columns + column[None, :]
    position = tl.load(rows + row, mask=is_row, other=0)[:, None] + tl.load(columns + column, mask=is_column, other=0)[None, :]
    word = tl.load(second + row * second_stride, mask=is_row, other=0)[:, None]
    kept = (_drawn(position, word) <= LARGEST_KEPT).to(tl.float32)
    # A product, not a choice: what is dropped of an infinity is no number, as in plain ops.
    value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32) * kept * scale
    if residual is not None:
        value += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, value.to(out.dtype.element_ty), mask=inside)


def dropout(
    x: Tensor, residual: Tensor | None, rows: Tensor, second: Tensor, columns: Tensor, *, keep_below: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """x · kept · scale, plus `residual` where there is one, as `dtype`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    num_columns = x.shape[-1]
    num_rows = x.numel() // num_columns
    x, residual, columns = x.contiguous(), None if residual is None else residual.contiguous(), columns.contiguous()
    rows = rows.expand(*x.shape[:-1], 1).contiguous()
    if second.numel() > 1:
        second = second.expand(*x.shape[:-1], 1).contiguous()
    block_columns = triton.next_power_of_2(num_columns)
    block_rows = min(BLOCK // min(block_columns, COLUMNS), triton.next_power_of_2(num_rows))
    block_columns = min(block_columns, BLOCK // block_rows)
    launch(
        dropout_tiles, (triton.cdiv(num_rows, block_rows) * triton.cdiv(num_columns, block_columns),),
        x, residual, rows, second, columns, out, num_rows, num_columns, int(second.numel() > 1), scale,
        LARGEST_KEPT=keep_below - 1, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=8,
    )  # fmt: skip
    return out
