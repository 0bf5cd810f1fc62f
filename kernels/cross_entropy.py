"""The sums over classes that every cross entropy is made of, as one op of ours, with their backward as a second one.

    log_sum_exp = log Σ exp(x)        picked = x[label], 0 where the label is none of `classes`        total = Σ x
    dx          = dlog_sum_exp · exp(x − log_sum_exp) + dpicked · [class = label] + dtotal

logits x are [..., V], labels [...] int64, classes [V] int64, ascending: 0 … V − 1 of a whole vocabulary, a rank's part of them where
it is split. Columns at the end whose class is negative are padding, whatever they hold. The loss of a row, log_sum_exp − picked, its
mean over the rows that count and label smoothing are plain ops on rows (`passes/forward/fuse_cross_entropy.py`), which are split by the
rules of any sum; so are these three: over the vocabulary ranks exchange a number a row and never a logit. Results are float32, float64 for
float64 logits; a row whose gradients are 0 gets zeros even where its logits are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.registration import (
    DECOMPOSITIONS,
    INSIDE,
    Classes,
    OpTraits,
    ReductionKind,
    Shape,
    SplitRule,
    accumulation_dtype,
    positional,
    register_op,
    runs_triton,
)

# 512 KiB of float32: what a second-level cache holds, and large enough for calls to cost little beside.
_BLOCK_ELEMENTS = 1 << 17


def cross_entropy_reference(logits: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log_sum_exp, picked, total) in plain ops, none of which looks at values."""
    scores, is_class = logits.to(accumulation_dtype(logits)), classes >= 0
    index = index_of(labels, classes)
    picked = scores.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(index < 0, 0.0)
    log_sum_exp, total = torch.where(is_class, scores, -torch.inf).logsumexp(-1), torch.where(is_class, scores, 0.0).sum(-1)
    return log_sum_exp.contiguous(), picked.contiguous(), total.contiguous()


def cross_entropy_backward_reference(
    grad_log_sum_exp: Tensor | None,
    grad_picked: Tensor | None,
    grad_total: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    classes: Tensor,
    log_sum_exp: Tensor,
) -> Tensor:
    """The gradient of the logits in plain ops, none of which looks at values."""
    exact = accumulation_dtype(logits)
    by_sum, by_label, by_all = (
        None if each is None else each.to(exact).unsqueeze(-1) for each in (grad_log_sum_exp, grad_picked, grad_total)
    )
    if by_sum is None:
        grad = torch.zeros(logits.shape, dtype=exact, device=logits.device)
    else:
        power = (logits.to(exact) - log_sum_exp.unsqueeze(-1)).exp()
        grad = torch.where(by_sum == 0, 0.0, power * by_sum)
    if by_label is not None:
        columns = torch.arange(logits.shape[-1], device=logits.device)
        grad = grad + torch.where(columns == index_of(labels, classes).unsqueeze(-1), by_label, 0.0)
    grad = grad if by_all is None else grad + by_all
    return grad.to(logits.dtype).contiguous()


def _blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Rows that fit into a core's cache together, so that the passes over them, and what is between, go to no memory."""
    step = max(_BLOCK_ELEMENTS * torch.get_num_threads() // max(num_columns, 1), 1)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def cross_entropy_in_blocks(logits: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, some rows at a time."""
    exact = accumulation_dtype(logits)
    rows, index = logits.reshape(-1, logits.shape[-1]), index_of(labels.reshape(-1), classes)
    picked = rows.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(exact).masked_fill_(index < 0, 0.0)
    log_sum_exp, total = torch.empty_like(picked), torch.empty_like(picked)
    scores = rows[:, : int((classes >= 0).sum())]
    for at in _blocks(*rows.shape):
        block = scores[at].to(exact)
        torch.logsumexp(block, -1, out=log_sum_exp[at])
        torch.sum(block, -1, out=total[at])
    shape = labels.shape
    return log_sum_exp.view(shape), picked.view(shape), total.view(shape)


def cross_entropy_backward_in_blocks(
    grad_log_sum_exp: Tensor | None,
    grad_picked: Tensor | None,
    grad_total: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    classes: Tensor,
    log_sum_exp: Tensor,
) -> Tensor:
    """As the reference, some rows at a time."""
    exact, rows = accumulation_dtype(logits), logits.reshape(-1, logits.shape[-1])
    index, subtracted = index_of(labels.reshape(-1), classes).unsqueeze(-1), log_sum_exp.reshape(-1, 1)
    arrives, there, everywhere = (
        None if each is None else each.reshape(-1, 1).to(exact) for each in (grad_log_sum_exp, grad_picked, grad_total)
    )
    there = None if there is None else there.masked_fill(index < 0, 0.0)
    index.clamp_(min=0)
    is_dead = None if arrives is None or bool((arrives != 0).all()) else arrives == 0
    grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for at in _blocks(*rows.shape):
        block = grad[at] if grad.dtype == exact else torch.empty_like(grad[at], dtype=exact)
        if arrives is None:
            block.zero_()
        else:
            block.copy_(rows[at]).sub_(subtracted[at]).exp_().mul_(arrives[at])
        if is_dead is not None:
            block.masked_fill_(is_dead[at], 0.0)
        if there is not None:
            block.scatter_add_(-1, index[at], there[at])
        if everywhere is not None:
            block.add_(everywhere[at])
        if grad.dtype != exact:
            grad[at] = block
    return grad.view(logits.shape)


def index_of(labels: Tensor, classes: Tensor) -> Tensor:
    """Where each label stands in `classes`; −1 where it does not."""
    ascending = classes.masked_fill(classes < 0, torch.iinfo(classes.dtype).max)
    index = torch.searchsorted(ascending, labels).clamp_(max=classes.shape[0] - 1)
    return index.masked_fill_(ascending[index] != labels, -1)


def _cross_entropy(logits: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_triton(logits):
        return cross_entropy_in_blocks(logits, labels, classes)
    from autopar.kernels.gpu import cross_entropy as gpu

    return gpu.forward(logits, index_of(labels, classes), (classes >= 0).sum())


def _cross_entropy_backward(
    grad_log_sum_exp: Tensor | None,
    grad_picked: Tensor | None,
    grad_total: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    classes: Tensor,
    log_sum_exp: Tensor,
) -> Tensor:
    arguments = (grad_log_sum_exp, grad_picked, grad_total, logits, labels, classes, log_sum_exp)
    if not runs_triton(logits):
        return cross_entropy_backward_in_blocks(*arguments)
    from autopar.kernels.gpu import cross_entropy as gpu

    return gpu.backward(grad_log_sum_exp, grad_picked, grad_total, logits, index_of(labels, classes), log_sum_exp)


def _cross_entropy_fake(logits: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if labels.shape != logits.shape[:-1] or classes.shape != logits.shape[-1:]:
        shapes = f"{tuple(logits.shape)}, {tuple(labels.shape)} and {tuple(classes.shape)}"
        raise ValueError(f"cross entropy takes logits [..., V], labels [...] and classes [V]; got {shapes}")
    exact = accumulation_dtype(logits)
    return (
        logits.new_empty(labels.shape, dtype=exact),
        logits.new_empty(labels.shape, dtype=exact),
        logits.new_empty(labels.shape, dtype=exact),
    )


def _cross_entropy_backward_fake(
    grad_log_sum_exp: Tensor | None,
    grad_picked: Tensor | None,
    grad_total: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    classes: Tensor,
    log_sum_exp: Tensor,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[0])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
    if all(gradient is None for gradient in gradients):
        return None, None, None
    return cross_entropy_backward(*gradients, *ctx.saved_tensors), None, None


def _cross_entropy_rule(logits: Shape, labels: Shape, classes: Shape) -> SplitRule:
    """Numbers of rows, unreduced over the classes."""
    *of_rows, of_classes = positional(logits)
    by_row = tuple(of_rows)
    reductions: dict[str, tuple[ReductionKind, ...]] = {str(of_classes): ("logsumexp", "sum", "sum")}
    return SplitRule(((*by_row, of_classes), by_row, (of_classes,)), (by_row,) * 3, reductions=reductions)


def _cross_entropy_backward_rule(*shapes: Shape | None) -> SplitRule:
    logits = shapes[3]
    assert logits is not None, shapes
    *of_rows, of_classes = positional(logits)
    by_row, whole = tuple(of_rows), positional(logits)
    return SplitRule((by_row, by_row, by_row, whole, by_row, (of_classes,), by_row), (whole,), linear=(frozenset({0, 1, 2}),))


register_op(
    "cross_entropy",
    "(Tensor logits, Tensor labels, Tensor classes) -> (Tensor, Tensor, Tensor)",
    _cross_entropy,
    _cross_entropy_fake,
    OpTraits(_cross_entropy_rule, classes=Classes(labels=1, numbers=2)),
)
register_op(
    "cross_entropy_backward",
    "(Tensor? grad_log_sum_exp, Tensor? grad_picked, Tensor? grad_total, Tensor logits, Tensor labels, Tensor classes, "
    "Tensor log_sum_exp) -> Tensor",
    _cross_entropy_backward,
    _cross_entropy_backward_fake,
    OpTraits(_cross_entropy_backward_rule, classes=Classes(labels=4, numbers=5, skips_padding=False)),
)
torch.library.register_autograd("autopar::cross_entropy", _differentiate, setup_context=_save)

cross_entropy = torch.ops.autopar.cross_entropy.default
cross_entropy_backward = torch.ops.autopar.cross_entropy_backward.default


def _inside(logits: Tensor, labels: Tensor, classes: Tensor) -> int:
    """The index; of a block of rows the exponentials, greatest scores, and itself in another dtype."""
    exact, columns = accumulation_dtype(logits), logits.shape[-1]
    block = next((each.stop for each in _blocks(labels.numel(), columns)), 0)
    block = min(block, labels.numel()) * exact.itemsize
    return labels.nbytes + block * (columns * (1 if logits.dtype == exact else 2) + 1)


def _inside_backward(
    grad_log_sum_exp: Tensor | None,
    grad_picked: Tensor | None,
    grad_total: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    classes: Tensor,
    log_sum_exp: Tensor,
) -> int:
    """The index, what arrives there, rows that are dead; in another dtype a block, and the one before it until it is made."""
    exact, columns = accumulation_dtype(logits), logits.shape[-1]
    block = next((each.stop for each in _blocks(labels.numel(), columns)), 0)
    block = 0 if logits.dtype == exact else min(2 * block, labels.numel()) * columns * exact.itemsize
    picked = 0 if grad_picked is None else labels.numel() * exact.itemsize
    return labels.nbytes + picked + (0 if grad_log_sum_exp is None else labels.numel()) + block


INSIDE[cross_entropy], INSIDE[cross_entropy_backward] = _inside, _inside_backward
DECOMPOSITIONS[cross_entropy], DECOMPOSITIONS[cross_entropy_backward] = cross_entropy_reference, cross_entropy_backward_reference
