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
def cross_entropy_rows(logits, indices, num_classes, log_sum_exp, picked, totals, columns, BLOCK_COLUMNS: tl.constexpr):
    classes = tl.load(num_classes)  # the columns after them are padding
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    largest = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
    power = tl.zeros([BLOCK_COLUMNS], tl.float32)
    plain = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < classes
        score = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, score)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        power = power * tl.exp(largest - base) + tl.exp(score - base)
        largest = larger
        plain += tl.where(inside, score, 0.0)
    top = tl.max(largest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(log_sum_exp + row, base + tl.log(tl.sum(power * tl.exp(largest - base), 0)))
    index = tl.load(indices + row)
    tl.store(picked + row, tl.where(index >= 0, tl.load(logits + tl.maximum(index, 0)).to(tl.float32), 0.0))
    tl.store(totals + row, tl.sum(plain, 0))


@triton.jit
def cross_entropy_backward_pieces(
    grad_log_sum_exp, grad_picked, grad_total, logits, indices, log_sum_exp, grad, columns,
    HAS_POWER: tl.constexpr, HAS_PICKED: tl.constexpr, HAS_TOTAL: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < columns
    result = tl.zeros([BLOCK_COLUMNS], tl.float32)
    if HAS_POWER:
        arrives = tl.load(grad_log_sum_exp + row).to(tl.float32)
        score = tl.load(logits + row * columns + column, mask=inside, other=float("-inf")).to(tl.float32)
        # 0 · NaN: a row that does not count has no gradient even where its logits are not finite.
        result = tl.where(arrives == 0.0, 0.0, arrives * tl.exp(score - tl.load(log_sum_exp + row)))
    if HAS_PICKED:
        result += tl.where(column == tl.load(indices + row), tl.load(grad_picked + row).to(tl.float32), 0.0)
    if HAS_TOTAL:
        result += tl.load(grad_total + row).to(tl.float32)
    tl.store(grad + row * columns + column, result.to(grad.dtype.element_ty), mask=inside)


def forward(logits: Tensor, index: Tensor, num_classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log_sum_exp, picked, total), float32, of the first `num_classes` (0-d) columns of every row of logits [..., V].

    index [...] int64 is the label's column, −1 where it has none here.
    """
    logits, index = logits.contiguous(), index.contiguous()
    log_sum_exp, picked, total = (logits.new_empty(index.shape, dtype=torch.float32) for _ in range(3))
    columns = logits.shape[-1]
    block = min(triton.next_power_of_2(columns), CHUNK_BYTES // logits.element_size())
    launch(
        cross_entropy_rows, (index.numel(),), logits, index, num_classes, log_sum_exp, picked, total, columns,
        BLOCK_COLUMNS=block, num_warps=max(min(block // 256, 8), 1),
    )  # fmt: skip
    return log_sum_exp, picked, total


def backward(
    grad_log_sum_exp: Tensor | None,
    grad_picked: Tensor | None,
    grad_total: Tensor | None,
    logits: Tensor,
    index: Tensor,
    log_sum_exp: Tensor,
) -> Tensor:
    """The gradient of the logits, also of columns that are padding. A gradient of the results that is None is 0."""
    logits, index, log_sum_exp = logits.contiguous(), index.contiguous(), log_sum_exp.contiguous()
    # What is not there is not read; any pointer stands for it.
    arriving = [log_sum_exp if item is None else item.contiguous() for item in (grad_log_sum_exp, grad_picked, grad_total)]
    grad = torch.empty_like(logits)
    columns = logits.shape[-1]
    block = min(triton.next_power_of_2(columns), BACKWARD_COLUMNS)
    launch(
        cross_entropy_backward_pieces, (index.numel(), triton.cdiv(columns, block)),
        *arriving, logits, index, log_sum_exp, grad, columns,
        HAS_POWER=grad_log_sum_exp is not None, HAS_PICKED=grad_picked is not None, HAS_TOTAL=grad_total is not None,
        BLOCK_COLUMNS=block, num_warps=max(min(block // 256, 8), 1),
    )  # fmt: skip
    return grad
