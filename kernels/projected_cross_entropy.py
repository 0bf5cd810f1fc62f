"""The sums of `autopar.cross_entropy` of logits that are never there whole: hidden states times the vocabulary's weight, in chunks.

    x = hidden · weightᵀ                    (log_sum_exp, picked, total) of x, as `autopar/kernels/cross_entropy.py` has them
    dhidden = dx · weight                   dweight = dxᵀ · hidden, summed over chunks in float32 (float64 for float64)

hidden is [..., K], weight [V, K], labels [...] int64, classes [V] int64, consecutive. A chunk of rows is as long as keeps its logits
at 2²⁶ elements; the backward computes them again, a third of the projection's work on top. (Wijmans et al., Cut Your Losses, 2024,
keep them in registers instead; matrix products of the vendor's and a chunk in memory are what runs everywhere.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from autopar.kernels.registration import Classes, OpTraits, ReductionKind, Shape, SplitRule, accumulation_dtype, register_op, rows

CHUNK_ELEMENTS = 1 << 26


def _chunks(num_rows: int, num_classes: int) -> Iterator[slice]:
    step = max(CHUNK_ELEMENTS // max(num_classes, 1), 1)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _projected(hidden: Tensor, weight: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    results = tuple(hidden.new_empty(flat.shape, dtype=accumulation_dtype(hidden)) for _ in range(3))
    for chunk in _chunks(flat.shape[0], weight.shape[0]):
        for whole, part in zip(results, cross_entropy(rows[chunk] @ weight.mT, flat[chunk], classes), strict=True):
            whole[chunk] = part
    log_sum_exp, picked, total = (result.reshape(labels.shape) for result in results)
    return log_sum_exp, picked, total


def _projected_backward(
    grad_log_sum_exp: Tensor | None,
    grad_picked: Tensor | None,
    grad_total: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    classes: Tensor,
    log_sum_exp: Tensor,
) -> tuple[Tensor, Tensor]:
    rows, flat, sums = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), log_sum_exp.reshape(-1)
    arriving = [None if item is None else item.reshape(-1) for item in (grad_log_sum_exp, grad_picked, grad_total)]
    exact = accumulation_dtype(hidden)
    grad_hidden = hidden.new_empty(rows.shape)
    grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device)
    for chunk in _chunks(flat.shape[0], weight.shape[0]):
        there = [None if item is None else item[chunk] for item in arriving]
        grad = cross_entropy_backward(*there, rows[chunk] @ weight.mT, flat[chunk], classes, sums[chunk])
        grad_hidden[chunk] = grad @ weight
        grad_weight += grad.mT @ rows[chunk]
    return grad_hidden.reshape(hidden.shape), grad_weight.to(weight.dtype)


def _projected_fake(hidden: Tensor, weight: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fits = labels.shape == hidden.shape[:-1] and weight.shape == (*classes.shape, hidden.shape[-1]) and hidden.dtype == weight.dtype
    if not fits:
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(labels.shape)} and {tuple(classes.shape)}"
        raise ValueError(f"hidden [..., K] and weight [V, K] of one dtype, labels [...] and classes [V] are wanted; got {shapes}")
    exact = accumulation_dtype(hidden)
    log_sum_exp, picked, total = (hidden.new_empty(labels.shape, dtype=exact) for _ in range(3))
    return log_sum_exp, picked, total


def _projected_backward_fake(
    grad_log_sum_exp: Tensor | None,
    grad_picked: Tensor | None,
    grad_total: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    classes: Tensor,
    log_sum_exp: Tensor,
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[0])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
    if all(gradient is None for gradient in gradients):
        return None, None, None, None
    return *projected_cross_entropy_backward(*gradients, *ctx.saved_tensors), None, None


_REDUCTIONS: dict[str, tuple[ReductionKind, ...]] = {"v": ("logsumexp", "sum", "sum")}


def _projected_rule(hidden: Shape, weight: Shape, labels: Shape, classes: Shape) -> SplitRule:
    """As of cross entropy; what is inside a softmax cannot be split over K."""
    of_hidden = rows(hidden)
    by_row = of_hidden[:-1]
    flops = 2.0 * math.prod(hidden) * weight[0]
    return SplitRule((of_hidden, ("v", None), by_row, ("v",)), (by_row,) * 3, reductions=_REDUCTIONS, flops=flops)


def _projected_backward_rule(*shapes: Shape | None) -> SplitRule:
    hidden, weight = shapes[3:5]
    assert hidden is not None and weight is not None, shapes
    of_hidden = rows(hidden)
    by_row = of_hidden[:-1]
    arguments = (by_row, by_row, by_row, of_hidden, ("v", None), by_row, ("v",), by_row)
    flops = 6.0 * math.prod(hidden) * weight[0]
    return SplitRule(arguments, (of_hidden, ("v", None)), linear=(frozenset({0, 1, 2}),), flops=flops)


_OPERANDS = "Tensor hidden, Tensor weight, Tensor labels, Tensor classes"
register_op(
    "projected_cross_entropy",
    f"({_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    _projected,
    _projected_fake,
    OpTraits(_projected_rule, classes=Classes(labels=2, numbers=3)),
)
register_op(
    "projected_cross_entropy_backward",
    f"(Tensor? grad_log_sum_exp, Tensor? grad_picked, Tensor? grad_total, {_OPERANDS}, Tensor log_sum_exp) -> (Tensor, Tensor)",
    _projected_backward,
    _projected_backward_fake,
    OpTraits(_projected_backward_rule, classes=Classes(labels=5, numbers=6)),
)
torch.library.register_autograd("autopar::projected_cross_entropy", _differentiate, setup_context=_save)

projected_cross_entropy = torch.ops.autopar.projected_cross_entropy.default
projected_cross_entropy_backward = torch.ops.autopar.projected_cross_entropy_backward.default
