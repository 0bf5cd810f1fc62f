"""Cross entropy of given logits, row by row, as one op of ours, with its backward as a second one.

    loss    = (1 − ε) · (log_sum_exp − x[label]) + ε · (log_sum_exp − mean(x))          0 where the label is `ignore_index`
    dlogits = dloss · (exp(x − log_sum_exp) − (1 − ε) · onehot(label) − ε / V)

logits are [..., V], labels [...] int64; ε is `label_smoothing`. The loss of a row, not their mean: sums and counts of rows are
split by the rules of any sum. loss and log_sum_exp are float32, float64 for float64 logits. A label that is no column and is not
ignored raises on a CPU and gives NaN on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.kernels.registration import accumulation_dtype, register_op, runs_triton


def cross_entropy_reference(logits: Tensor, labels: Tensor, *, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """(loss, log_sum_exp) in plain ops."""
    scores = logits.to(accumulation_dtype(logits))
    log_sum_exp = scores.logsumexp(-1)
    ignored = labels == ignore_index
    picked = scores.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    loss = log_sum_exp - picked
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (log_sum_exp - scores.mean(-1))
    return loss.masked_fill(ignored, 0.0), log_sum_exp.contiguous()


def cross_entropy_backward_reference(
    grad_loss: Tensor, logits: Tensor, labels: Tensor, log_sum_exp: Tensor, *, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The gradient of the logits in plain ops."""
    exact = accumulation_dtype(logits)
    ignored = (labels == ignore_index).unsqueeze(-1)
    index = labels.unsqueeze(-1).masked_fill(ignored, 0)
    probability = (logits.to(exact) - log_sum_exp.unsqueeze(-1)).exp() - label_smoothing / logits.shape[-1]
    difference = probability.scatter_add(-1, index, torch.full_like(index, label_smoothing - 1.0, dtype=exact))
    return (difference * grad_loss.to(exact).unsqueeze(-1)).masked_fill(ignored, 0.0).to(logits.dtype).contiguous()


def _cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    if not runs_triton(logits):
        return cross_entropy_reference(logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)
    from autopar.kernels.gpu import cross_entropy as gpu

    return gpu.forward(logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)


def _cross_entropy_backward(
    grad_loss: Tensor, logits: Tensor, labels: Tensor, log_sum_exp: Tensor, *, ignore_index: int, label_smoothing: float
) -> Tensor:
    arguments = (grad_loss, logits, labels, log_sum_exp)
    if not runs_triton(logits):
        return cross_entropy_backward_reference(*arguments, ignore_index=ignore_index, label_smoothing=label_smoothing)
    from autopar.kernels.gpu import cross_entropy as gpu

    return gpu.backward(*arguments, ignore_index=ignore_index, label_smoothing=label_smoothing)


def _cross_entropy_fake(logits: Tensor, labels: Tensor, *, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"cross entropy takes logits [..., V] and labels [...]; got {tuple(logits.shape)} and {tuple(labels.shape)}")
    loss, log_sum_exp = (logits.new_empty(labels.shape, dtype=accumulation_dtype(logits)) for _ in range(2))
    return loss, log_sum_exp


def _cross_entropy_backward_fake(
    grad_loss: Tensor, logits: Tensor, labels: Tensor, log_sum_exp: Tensor, *, ignore_index: int, label_smoothing: float
) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])
    ctx.options = keyword_only_inputs


def _differentiate(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor, None]:
    return cross_entropy_backward(grad_loss, *ctx.saved_tensors, **ctx.options), None


_OPTIONS = "*, int ignore_index, float label_smoothing"
register_op("cross_entropy", f"(Tensor logits, Tensor labels, {_OPTIONS}) -> (Tensor, Tensor)", _cross_entropy, _cross_entropy_fake)
register_op(
    "cross_entropy_backward",
    f"(Tensor grad_loss, Tensor logits, Tensor labels, Tensor log_sum_exp, {_OPTIONS}) -> Tensor",
    _cross_entropy_backward,
    _cross_entropy_backward_fake,
)
torch.library.register_autograd("autopar::cross_entropy", _differentiate, setup_context=_save)

cross_entropy = torch.ops.autopar.cross_entropy.default
cross_entropy_backward = torch.ops.autopar.cross_entropy_backward.default
