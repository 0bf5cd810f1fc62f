"""Triton kernels of `autopar::softmax` and its backward: see `autopar/kernels/softmax.py` for what they compute.

columns ≤ 16,384    a program holds BLOCK_ROWS whole rows: every element is read once
more                one row a program, in chunks: the maximum and the sum in one walk, the results in a second,
                    which finds the row in the L2 cache (one row a multiprocessor: 33 MB at 131,072 columns of bf16)
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.registration import launch

MOST_COLUMNS_HELD = 16384
CHUNK_BYTES = 8192
NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2


@triton.jit
def _scores(x, mask, row, column, inside, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_column, scale, MASK: tl.constexpr):
    """scale · x + mask, float32, −inf outside. `row` and `column` broadcast against each other, `row` is int64."""
    score = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32) * scale
    if MASK != 0:
        outer = row // size_2
        start = (outer // size_1) * stride_0 + (outer % size_1) * stride_1 + (row % size_2) * stride_2
        masked = tl.load(mask + start + column * stride_column, mask=inside, other=0)
        if MASK == 1:
            score = tl.where(masked != 0, score, float("-inf"))
        else:
            score += masked.to(tl.float32)
    return tl.where(inside, score, float("-inf"))


@triton.jit
def softmax_rows(
    x, mask, out, rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_column, scale,
    MASK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    score = _scores(x, mask, row, column, inside, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_column, scale, MASK)
    largest = tl.max(score, 1, keep_dims=True)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    power = tl.exp(score - largest)
    total = tl.sum(power, 1, keep_dims=True)
    # A row without anything to attend to is 0, not 0 / 0.
    power = power / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * columns + column, power.to(out.dtype.element_ty), mask=inside)


@triton.jit
def softmax_chunks(
    x, mask, out, rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_column, scale,
    MASK: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # A maximum and a sum for each lane, so that no step of the walk waits for a reduction (Milakov and Gimelshein, 2018).
    largest = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        score = _scores(x, mask, row, column, inside, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_column, scale, MASK)
        larger = tl.maximum(largest, score)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(score - base)
        largest = larger
    top = tl.max(largest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    whole = tl.sum(total * tl.exp(largest - top), 0)
    whole = tl.where(whole == 0.0, 1.0, whole)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        score = _scores(x, mask, row, column, inside, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_column, scale, MASK)
        tl.store(out + row * columns + column, (tl.exp(score - top) / whole).to(out.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_rows(grad_out, out, grad, rows, columns, scale, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    where = row * columns + column
    arrives = tl.load(grad_out + where, mask=inside, other=0.0).to(tl.float32)
    probability = tl.load(out + where, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(arrives * probability, 1, keep_dims=True)
    tl.store(grad + where, (scale * probability * (arrives - mean)).to(grad.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_chunks(grad_out, out, grad, rows, columns, scale, BLOCK_COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        arrives = tl.load(grad_out + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        total += arrives * tl.load(out + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        arrives = tl.load(grad_out + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        probability = tl.load(out + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        result = scale * probability * (arrives - mean)
        tl.store(grad + row * columns + column, result.to(grad.dtype.element_ty), mask=inside)


def forward(x: Tensor, mask: Tensor | None, *, scale: float, dtype: torch.dtype) -> Tensor:
    """softmax(scale · x + mask) over the last dim of x [..., N], contiguous, of `dtype`."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    kind = NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK
    mask, sizes, strides = _three_dims(mask, x)
    arguments = (x, mask, out, rows, columns, *sizes, *strides, scale)
    if columns > MOST_COLUMNS_HELD:
        launch(softmax_chunks, (rows,), *arguments, MASK=kind, BLOCK_COLUMNS=CHUNK_BYTES // x.element_size(), num_warps=16)
        return out
    block_rows, block_columns, num_warps = rows_held(columns)
    grid = (triton.cdiv(rows, block_rows),)
    launch(softmax_rows, grid, *arguments, MASK=kind, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=num_warps)
    return out


def backward(grad_out: Tensor, out: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    """scale · out · (grad_out − Σ grad_out · out), of `dtype`."""
    grad_out, out = grad_out.contiguous(), out.contiguous()
    grad = torch.empty_like(out, dtype=dtype)
    columns = out.shape[-1]
    rows = out.numel() // max(columns, 1)
    arguments = (grad_out, out, grad, rows, columns, scale)
    if columns > MOST_COLUMNS_HELD:
        launch(softmax_backward_chunks, (rows,), *arguments, BLOCK_COLUMNS=CHUNK_BYTES // out.element_size(), num_warps=16)
        return grad
    block_rows, block_columns, num_warps = rows_held(columns)
    grid = (triton.cdiv(rows, block_rows),)
    launch(softmax_backward_rows, grid, *arguments, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=num_warps)
    return grad


def rows_held(columns: int) -> tuple[int, int, int]:
    """(rows and columns of a tile, warps): tiles of at least 2,048 elements, 16 to 32 of them a thread."""
    block_columns = max(triton.next_power_of_2(columns), 16)
    block_rows = max(2048 // block_columns, 1)
    return block_rows, block_columns, min(max(block_rows * block_columns // 512, 4), 16)


def _three_dims(mask: Tensor | None, x: Tensor) -> tuple[Tensor, tuple[int, int], tuple[int, int, int, int]]:
    """The mask, and how rows of x find theirs: sizes of two inner dims of rows, strides of three dims of rows and of the columns.

    A mask [B, 1, S, T] against scores [B, H, S, T] is read where it lies. What needs more than three dims is copied.
    """
    if mask is None:
        return x, (1, 1), (0, 0, 0, 0)
    whole = mask.expand(x.shape)
    dims = _merged(whole.shape[:-1], whole.stride()[:-1])
    if len(dims) > 3:
        whole = whole.contiguous()
        dims = _merged(whole.shape[:-1], whole.stride()[:-1])
    dims = [(1, 0)] * (3 - len(dims)) + dims
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = dims
    return whole, (size_1, size_2), (stride_0, stride_1, stride_2, whole.stride(-1))


def _merged(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(size, stride) of as few dims as walk over the same addresses in the same order."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims
