"""Triton kernels of `autopar::norm`, `add_norm` and their backward: see `autopar/kernels/normalisation.py` for what they compute.

    forward, columns ≤ 16,384    a program holds BLOCK_ROWS whole rows
    forward, more                one row a program, in chunks: statistics in one walk, results in a second, which finds the row in L2
    backward, columns ≤ 8,192    a program walks over every n-th tile of rows and keeps its sums for weight and bias in registers
    backward, more               one row a program for x, and a second kernel, a strip of columns a program, for weight and bias

Sums for weight and bias are float32 partial sums, one row of them a program, added up in a fixed order: no atomics.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.registration import launch

MOST_COLUMNS_FORWARD, MOST_COLUMNS_BACKWARD = 16384, 8192
CHUNK = 2048
# Programs of the backward: each writes one row of partial sums.
MOST_PARTIAL_SUMS = 512
STRIP_COLUMNS, STRIP_ROWS = 64, 32


@triton.jit
def _summed(x, residual, where, inside, HAS_RESIDUAL: tl.constexpr):
    """x, or x + residual rounded as it is stored, in float32."""
    value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _affine(value, weight, bias, column, columns, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_WEIGHT:
        value *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    return value


@triton.jit
def norm_rows(
    x, residual, weight, bias, out, total, mean, reciprocal, rows, columns, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    where = row[:, None] * columns + column
    value = _summed(x, residual, where, inside, HAS_RESIDUAL)
    if HAS_RESIDUAL:
        tl.store(total + where, value.to(total.dtype.element_ty), mask=inside)
    centre = tl.zeros([BLOCK_ROWS], tl.float32)
    if CENTRED:
        centre = tl.sum(value, 1) / columns
        value = tl.where(inside, value - centre[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / columns + eps)
    tl.store(mean + row, centre, mask=row < rows)
    tl.store(reciprocal + row, scale, mask=row < rows)
    result = _affine(value * scale[:, None], weight, bias, column, columns, HAS_WEIGHT, HAS_BIAS)
    tl.store(out + where, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_chunks(
    x, residual, weight, bias, out, total, mean, reciprocal, rows, columns, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # Each lane keeps a count, a mean and a sum of squares around it (Welford, 1962); they are joined at the end (Chan et al., 1983).
    count = tl.zeros([BLOCK_COLUMNS], tl.float32)
    centre = tl.zeros([BLOCK_COLUMNS], tl.float32)
    squares = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        value = _summed(x, residual, row * columns + column, inside, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(total + row * columns + column, value.to(total.dtype.element_ty), mask=inside)
        count += tl.where(inside, 1.0, 0.0)
        difference = tl.where(inside, value - centre, 0.0)
        if CENTRED:
            centre += difference / tl.maximum(count, 1.0)
        squares += difference * tl.where(inside, value - centre, 0.0)
    middle = tl.sum(centre * count, 0) / columns
    variance = tl.sum(squares + count * (centre - middle) * (centre - middle), 0) / columns
    scale = tl.rsqrt(variance + eps)
    tl.store(mean + row, middle)
    tl.store(reciprocal + row, scale)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        value = (_summed(x, residual, row * columns + column, inside, HAS_RESIDUAL) - middle) * scale
        result = _affine(value, weight, bias, column, columns, HAS_WEIGHT, HAS_BIAS)
        tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_rows(
    grad_out, grad_total, total, mean, reciprocal, weight, grad, partial_weight, partial_bias, rows, columns,
    HAS_GRAD_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_COLUMNS)
    kept = column < columns
    factor = tl.load(weight + column, mask=kept, other=0.0).to(tl.float32)[None, :] if HAS_WEIGHT else 1.0
    sum_weight = tl.zeros([BLOCK_COLUMNS], tl.float32)
    sum_bias = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(program * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & kept[None, :]
        where = row[:, None] * columns + column[None, :]
        arrives = tl.load(grad_out + where, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + where, mask=inside, other=0.0).to(tl.float32)
        centre = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        scale = tl.load(reciprocal + row, mask=row < rows, other=0.0)[:, None]
        value = tl.where(inside, (value - centre) * scale, 0.0)
        if HAS_WEIGHT:
            sum_weight += tl.sum(arrives * value, 0)
        if HAS_BIAS:
            sum_bias += tl.sum(arrives, 0)
        arrives *= factor
        result = arrives - value * (tl.sum(arrives * value, 1) / columns)[:, None]
        if CENTRED:
            result -= (tl.sum(arrives, 1) / columns)[:, None]
        result *= scale
        if HAS_GRAD_TOTAL:
            result += tl.load(grad_total + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + where, result.to(grad.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(partial_weight + program * columns + column, sum_weight, mask=kept)
    if HAS_BIAS:
        tl.store(partial_bias + program * columns + column, sum_bias, mask=kept)


@triton.jit
def norm_backward_chunks(
    grad_out, grad_total, total, mean, reciprocal, weight, grad, rows, columns,
    HAS_GRAD_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, CENTRED: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    centre, scale = tl.load(mean + row), tl.load(reciprocal + row)
    products = tl.zeros([BLOCK_COLUMNS], tl.float32)
    sums = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        value = (tl.load(total + row * columns + column, mask=inside, other=0.0).to(tl.float32) - centre) * scale
        arrives = tl.load(grad_out + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        arrives = _affine(arrives, weight, weight, column, columns, HAS_WEIGHT, tl.constexpr(False))
        products += arrives * value
        sums += arrives
    product = tl.sum(products, 0) / columns
    average = tl.sum(sums, 0) / columns if CENTRED else 0.0
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        value = (tl.load(total + row * columns + column, mask=inside, other=0.0).to(tl.float32) - centre) * scale
        arrives = tl.load(grad_out + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        result = (_affine(arrives, weight, weight, column, columns, HAS_WEIGHT, tl.constexpr(False)) - value * product - average) * scale
        if HAS_GRAD_TOTAL:
            result += tl.load(grad_total + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + row * columns + column, result.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_columns(
    grad_out, total, mean, reciprocal, partial_weight, partial_bias, rows, columns,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    kept = column < columns
    program = tl.program_id(1)
    sum_weight = tl.zeros([BLOCK_COLUMNS], tl.float32)
    sum_bias = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(program * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & kept[None, :]
        where = row[:, None] * columns + column[None, :]
        arrives = tl.load(grad_out + where, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            centre = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
            scale = tl.load(reciprocal + row, mask=row < rows, other=0.0)[:, None]
            value = (tl.load(total + where, mask=inside, other=0.0).to(tl.float32) - centre) * scale
            sum_weight += tl.sum(arrives * value, 0)
        if HAS_BIAS:
            sum_bias += tl.sum(arrives, 0)
    if HAS_WEIGHT:
        tl.store(partial_weight + program * columns + column, sum_weight, mask=kept)
    if HAS_BIAS:
        tl.store(partial_bias + program * columns + column, sum_bias, mask=kept)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, x + residual, mean, 1 / deviation); without a residual the second is x."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    mean, reciprocal = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    columns = x.shape[-1]
    rows = x.numel() // columns
    weight, bias = (None if item is None else item.contiguous() for item in (weight, bias))
    arguments = (x, residual, weight, bias, out, total, mean, reciprocal, rows, columns, eps)
    flags = {"HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "CENTRED": centred}
    if columns > MOST_COLUMNS_FORWARD:
        launch(norm_chunks, (rows,), *arguments, **flags, BLOCK_COLUMNS=CHUNK, num_warps=8)
        return out, total, mean, reciprocal
    block_rows, block_columns, num_warps = rows_held(columns, 512)
    grid = (triton.cdiv(rows, block_rows),)
    launch(norm_rows, grid, *arguments, **flags, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=num_warps)
    return out, total, mean, reciprocal


def backward(
    grad_out: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    reciprocal: Tensor,
    weight: Tensor | None,
    *,
    centred: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x (and of the residual, which has the same), of the weight and of the bias, the latter two float32."""
    grad_out, total, mean, reciprocal = (item.contiguous() for item in (grad_out, total, mean, reciprocal))
    grad_total = None if grad_total is None else grad_total.contiguous()
    weight = None if weight is None else weight.contiguous()
    grad = torch.empty_like(total)
    columns = total.shape[-1]
    rows = total.numel() // columns
    has_weight = weight is not None
    flags = {"HAS_GRAD_TOTAL": grad_total is not None, "HAS_WEIGHT": has_weight, "CENTRED": centred}
    if columns > MOST_COLUMNS_BACKWARD:
        arguments = (grad_out, grad_total, total, mean, reciprocal, weight, grad, rows, columns)
        launch(norm_backward_chunks, (rows,), *arguments, **flags, BLOCK_COLUMNS=CHUNK, num_warps=8)
        return grad, *_strips(grad_out, total, mean, reciprocal, has_weight, has_bias)
    block_rows, block_columns, num_warps = rows_held(columns, 512)
    programs = min(triton.cdiv(rows, block_rows), MOST_PARTIAL_SUMS)
    partial_weight, partial_bias = _partial_sums(total, programs, has_weight), _partial_sums(total, programs, has_bias)
    launch(
        norm_backward_rows, (programs,),
        grad_out, grad_total, total, mean, reciprocal, weight, grad, partial_weight, partial_bias, rows, columns,
        **flags, HAS_BIAS=has_bias, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=num_warps,
    )  # fmt: skip
    return grad, _added(partial_weight), _added(partial_bias)


def _strips(
    grad_out: Tensor, total: Tensor, mean: Tensor, reciprocal: Tensor, has_weight: bool, has_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    if not has_weight and not has_bias:
        return None, None
    columns = total.shape[-1]
    rows = total.numel() // columns
    programs = min(triton.cdiv(rows, STRIP_ROWS), max(MOST_PARTIAL_SUMS * STRIP_COLUMNS // columns, 1))
    partial_weight, partial_bias = _partial_sums(total, programs, has_weight), _partial_sums(total, programs, has_bias)
    launch(
        norm_backward_columns, (triton.cdiv(columns, STRIP_COLUMNS), programs),
        grad_out, total, mean, reciprocal, partial_weight, partial_bias, rows, columns,
        HAS_WEIGHT=has_weight, HAS_BIAS=has_bias, BLOCK_ROWS=STRIP_ROWS, BLOCK_COLUMNS=STRIP_COLUMNS, num_warps=4,
    )  # fmt: skip
    return _added(partial_weight), _added(partial_bias)


def _partial_sums(like: Tensor, programs: int, wanted: bool) -> Tensor | None:
    return like.new_empty((programs, like.shape[-1]), dtype=torch.float32) if wanted else None


def _added(partial: Tensor | None) -> Tensor | None:
    return None if partial is None else partial.sum(0)


def rows_held(columns: int, elements_per_warp: int) -> tuple[int, int, int]:
    """(rows and columns of a tile, warps): tiles of at least 2,048 elements."""
    block_columns = max(triton.next_power_of_2(columns), 16)
    block_rows = max(2048 // block_columns, 1)
    return block_rows, block_columns, min(max(block_rows * block_columns // elements_per_warp, 4), 16)
