"""Triton kernels of `autopar::cross_entropy` and its backward: see `autopar/kernels/cross_entropy.py` for what they compute.

Forward: one row a program, read once, a running maximum and sum for each lane. Backward: one piece of a row a program.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.registration import launch

CHUNK_BYTES = 8192
BACKWARD_COLUMNS = 2048


@triton.jit
def cross_entropy_rows(
    logits, labels, loss, log_sum_exp, columns, ignore_index, smoothing, SMOOTHED: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    largest = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    plain = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        score = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, score)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(score - base)
        largest = larger
        if SMOOTHED:
            plain += tl.where(inside, score, 0.0)
    top = tl.max(largest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    logarithm = base + tl.log(tl.sum(total * tl.exp(largest - base), 0))
    label = tl.load(labels + row)
    known = (label >= 0) & (label < columns)
    # A label that is no column and is not to be ignored: NaN, for a kernel cannot raise.
    picked = tl.load(logits + tl.where(known, label, 0)).to(tl.float32)
    result = tl.where(known, logarithm - picked, float("nan"))
    if SMOOTHED:
        result = (1.0 - smoothing) * result + smoothing * (logarithm - tl.sum(plain, 0) / columns)
    tl.store(loss + row, tl.where(label == ignore_index, 0.0, result))
    tl.store(log_sum_exp + row, logarithm)


@triton.jit
def cross_entropy_backward_pieces(
    grad_loss, logits, labels, log_sum_exp, grad, columns, ignore_index, smoothing, BLOCK_COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < columns
    label = tl.load(labels + row)
    arrives = tl.where(label == ignore_index, 0.0, tl.load(grad_loss + row).to(tl.float32))
    score = tl.load(logits + row * columns + column, mask=inside, other=float("-inf")).to(tl.float32)
    wanted = tl.where(column == label, 1.0 - smoothing, 0.0) + smoothing / columns
    result = arrives * (tl.exp(score - tl.load(log_sum_exp + row)) - wanted)
    # 0 · NaN: an ignored row has no gradient even where its logits are not finite.
    result = tl.where(label == ignore_index, 0.0, result)
    tl.store(grad + row * columns + column, result.to(grad.dtype.element_ty), mask=inside)


def forward(logits: Tensor, labels: Tensor, *, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """(loss, log_sum_exp) of every row of logits [..., V], float32."""
    logits, labels = logits.contiguous(), labels.contiguous()
    loss, log_sum_exp = (logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(2))
    columns = logits.shape[-1]
    block = min(triton.next_power_of_2(columns), CHUNK_BYTES // logits.element_size())
    launch(
        cross_entropy_rows, (labels.numel(),), logits, labels, loss, log_sum_exp, columns, ignore_index, label_smoothing,
        SMOOTHED=label_smoothing != 0.0, BLOCK_COLUMNS=block, num_warps=max(min(block // 256, 8), 1),
    )  # fmt: skip
    return loss, log_sum_exp


def backward(
    grad_loss: Tensor, logits: Tensor, labels: Tensor, log_sum_exp: Tensor, *, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The gradient of the logits."""
    grad_loss, logits, labels, log_sum_exp = (item.contiguous() for item in (grad_loss, logits, labels, log_sum_exp))
    grad = torch.empty_like(logits)
    columns = logits.shape[-1]
    block = min(triton.next_power_of_2(columns), BACKWARD_COLUMNS)
    launch(
        cross_entropy_backward_pieces, (labels.numel(), triton.cdiv(columns, block)),
        grad_loss, logits, labels, log_sum_exp, grad, columns, ignore_index, label_smoothing,
        BLOCK_COLUMNS=block, num_warps=max(min(block // 256, 8), 1),
    )  # fmt: skip
    return grad
