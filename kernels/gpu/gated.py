"""Triton kernels of `autopar::gated`, `bias_activation` and their backward: see `autopar/kernels/gated.py` for what they compute.

Element by element; a piece of BLOCK elements a program. The bias's gradient sums over strips of rows into float32 partial sums.
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
STRIP_ROWS, STRIP_COLUMNS = 32, 128
MOST_STRIPS = 64
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4}


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh_inside(x):
    """tanh(√(2 / π) (x + 0.044715 x³)) as 2 · sigmoid(2 y) − 1, which neither over- nor underflows."""
    return 2.0 * _sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x)) - 1.0


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        result = x * _sigmoid(x)
    elif ACTIVATION == 1:
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:
        result = 0.5 * x * (1.0 + _tanh_inside(x))
    elif ACTIVATION == 3:
        result = tl.where(x <= 0.0, 0.0, x)
    else:
        result = _sigmoid(x)
    return result


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation."""
    if ACTIVATION == 0:
        s = _sigmoid(x)
        result = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == 1:
        result = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == 2:
        t = _tanh_inside(x)
        # 1 − t² is 0 where x³ is not finite.
        inner = tl.where(tl.abs(x) < 30.0, 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x), 0.0)
        result = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    elif ACTIVATION == 3:
        result = tl.where(x <= 0.0, 0.0, 1.0)
    else:
        s = _sigmoid(x)
        result = s * (1.0 - s)
    return result


@triton.jit
def gated_pieces(gate, up, out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < size
    g = tl.load(gate + where, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, (_activated(g, ACTIVATION) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_pieces(grad_out, gate, up, grad_gate, grad_up, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < size
    arrives = tl.load(grad_out + where, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + where, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_gate + where, (arrives * u * _slope(g, ACTIVATION)).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + where, (arrives * _activated(g, ACTIVATION)).to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def bias_activation_pieces(x, bias, out, size, columns, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < size
    value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + where % columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, _activated(value, ACTIVATION).to(out.dtype.element_ty), mask=inside)


@triton.jit
def bias_activation_backward_strips(
    grad_out, x, bias, grad, partial, rows, columns, ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    kept = column < columns
    program = tl.program_id(1)
    shift = tl.load(bias + column, mask=kept, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(program * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & kept[None, :]
        where = row[:, None] * columns + column[None, :]
        value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32) + shift
        result = tl.load(grad_out + where, mask=inside, other=0.0).to(tl.float32) * _slope(value, ACTIVATION)
        total += tl.sum(result, 0)
        tl.store(grad + where, result.to(grad.dtype.element_ty), mask=inside)
    tl.store(partial + program * columns + column, total, mask=kept)


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) · up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    launch(gated_pieces, grid, gate, up, out, gate.numel(), ACTIVATION=ACTIVATIONS[activation], BLOCK=BLOCK, num_warps=8)
    return out


def gated_backward(grad_out: Tensor, gate: Tensor, up: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad_out, gate, up = grad_out.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    arguments = (grad_out, gate, up, grad_gate, grad_up, gate.numel())
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    launch(gated_backward_pieces, grid, *arguments, ACTIVATION=ACTIVATIONS[activation], BLOCK=BLOCK, num_warps=8)
    return grad_gate, grad_up


def bias_activation(x: Tensor, bias: Tensor, *, activation: str) -> Tensor:
    """activation(x + bias)."""
    x, bias = x.contiguous(), bias.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    constants = {"ACTIVATION": ACTIVATIONS[activation], "BLOCK": BLOCK}
    launch(bias_activation_pieces, grid, x, bias, out, x.numel(), x.shape[-1], **constants, num_warps=8)
    return out


def bias_activation_backward(grad_out: Tensor, x: Tensor, bias: Tensor, *, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of the bias, float32."""
    grad_out, x, bias = grad_out.contiguous(), x.contiguous(), bias.contiguous()
    grad = torch.empty_like(x)
    columns = x.shape[-1]
    rows = x.numel() // columns
    strips = min(triton.cdiv(rows, STRIP_ROWS), MOST_STRIPS)
    partial = x.new_empty((strips, columns), dtype=torch.float32)
    launch(
        bias_activation_backward_strips, (triton.cdiv(columns, STRIP_COLUMNS), strips), grad_out, x, bias, grad, partial, rows, columns,
        ACTIVATION=ACTIVATIONS[activation], BLOCK_ROWS=STRIP_ROWS, BLOCK_COLUMNS=STRIP_COLUMNS, num_warps=8,
    )  # fmt: skip
    return grad, partial.sum(0)
