"""Softmax over the last dim, scaled and masked, as one op of ours, with its backward as a second one.

    P  = softmax(scale · x + mask), a row that attends to nothing being 0
    dx = scale · P ∘ (dP − rowsum(P ∘ dP))              dmask = dx / scale, summed to the mask's shape

x is [..., N] with N of any size; `mask` broadcasts to x: bool (true = attend) or a float that is added. Computed in float32
(float64 for float64) and rounded once, to `dtype`. Results are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.registration import (
    DECOMPOSITIONS,
    OpTraits,
    Shape,
    SplitRule,
    accumulation_dtype,
    broadcast,
    register_op,
    rows,
    runs_triton,
)


def softmax_reference(x: Tensor, mask: Tensor | None, *, scale: float, dtype: torch.dtype) -> Tensor:
    """The op in plain ops."""
    exact = accumulation_dtype(x)
    scores = x.to(exact) * scale
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(exact)
    largest = scores.amax(-1, keepdim=True) if x.shape[-1] else scores.new_zeros((*x.shape[:-1], 1))
    power = (scores - torch.where(largest == -torch.inf, 0.0, largest)).exp()
    total = power.sum(-1, keepdim=True)
    return (power / torch.where(total == 0, 1.0, total)).to(dtype).contiguous()


def softmax_backward_reference(grad_out: Tensor, out: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    """The gradient of x, of `dtype`, in plain ops."""
    exact = accumulation_dtype(out)
    arrives, probability = grad_out.to(exact), out.to(exact)
    return (scale * probability * (arrives - (arrives * probability).sum(-1, keepdim=True))).to(dtype).contiguous()


def _softmax(x: Tensor, mask: Tensor | None, *, scale: float, dtype: torch.dtype) -> Tensor:
    if not runs_triton(x):
        return softmax_reference(x, mask, scale=scale, dtype=dtype)
    from autopar.kernels.gpu import softmax as gpu

    return gpu.forward(x, mask, scale=scale, dtype=dtype)


def _softmax_backward(grad_out: Tensor, out: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    if not runs_triton(out):
        return softmax_backward_reference(grad_out, out, scale=scale, dtype=dtype)
    from autopar.kernels.gpu import softmax as gpu

    return gpu.backward(grad_out, out, scale=scale, dtype=dtype)


def _softmax_fake(x: Tensor, mask: Tensor | None, *, scale: float, dtype: torch.dtype) -> Tensor:
    if mask is not None and not _broadcasts(mask.shape, x.shape):
        raise ValueError(f"a softmax mask {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")
    return x.new_empty(x.shape, dtype=dtype)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(size in (1, whole) for size, whole in zip(reversed(shape), reversed(to), strict=False))


def _softmax_backward_fake(grad_out: Tensor, out: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    return out.new_empty(out.shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    x, mask = inputs
    ctx.save_for_backward(output)
    ctx.scale, ctx.dtype = keyword_only_inputs["scale"], x.dtype
    ctx.mask_shape, ctx.mask_dtype = (mask.shape, mask.dtype) if mask is not None else ((), None)


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
    (out,) = ctx.saved_tensors
    if not ctx.needs_input_grad[1]:
        return softmax_backward(grad_out, out, scale=ctx.scale, dtype=ctx.dtype), None
    # The mask is added after the scale, so its gradient is that of scale 1, and may be summed over many rows.
    grad_scores = softmax_backward(grad_out, out, scale=1.0, dtype=accumulation_dtype(out))
    return (grad_scores * ctx.scale).to(ctx.dtype), grad_scores.sum_to_size(ctx.mask_shape).to(ctx.mask_dtype)


def _softmax_rule(x: Shape, mask: Shape | None, **_: Any) -> SplitRule:
    labels = rows(x)
    return SplitRule((labels, () if mask is None else broadcast(mask, labels, x)), (labels,))


def _softmax_backward_rule(grad_out: Shape, out: Shape, **_: Any) -> SplitRule:
    return SplitRule((rows(out),) * 2, (rows(out),), linear=(frozenset({0}),))


register_op(
    "softmax", "(Tensor x, Tensor? mask, *, float scale, ScalarType dtype) -> Tensor", _softmax, _softmax_fake, OpTraits(_softmax_rule)
)
register_op(
    "softmax_backward",
    "(Tensor grad_out, Tensor out, *, float scale, ScalarType dtype) -> Tensor",
    _softmax_backward,
    _softmax_backward_fake,
    OpTraits(_softmax_backward_rule),
)
torch.library.register_autograd("autopar::softmax", _differentiate, setup_context=_save)

softmax = torch.ops.autopar.softmax.default
softmax_backward = torch.ops.autopar.softmax_backward.default
DECOMPOSITIONS[softmax], DECOMPOSITIONS[softmax_backward] = softmax_reference, softmax_backward_reference
