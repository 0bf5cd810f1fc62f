"""Layer norm (centred) and RMS norm (not centred) over the last dim, alone or of a sum, and their backward.

    total = x + residual, rounded to x's dtype                    (`add_norm`; `norm` has total = x)
    mean  = the row's mean, 0 where not centred                   reciprocal = 1 / sqrt(mean((total − mean)²) + eps)
    n     = (total − mean) · reciprocal                           out = n · weight + bias
    dn    = dout · weight
    dx    = reciprocal · (dn − n · mean(dn · n) − mean(dn)) + dtotal          (mean(dn) only where centred; the residual has the same)
    dweight, dbias = Σ dout · n, Σ dout, over all rows            (Ba et al., 2016; Zhang and Sennrich, 2019)

x and residual are [..., N], weight and bias [N], mean and reciprocal [...]; the latter two are float32, float64 for float64
inputs. Computed in that, and rounded once: `weight · (n rounded)`, which some models write, differs by that rounding.
A gradient of what is not there is an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.kernels.normalisation_reference import (
    add_norm_decomposition,
    norm_backward_decomposition,
    norm_backward_reference,
    norm_decomposition,
    norm_reference,
)
from autopar.kernels.registration import DECOMPOSITIONS, OpTraits, Shape, SplitRule, accumulation_dtype, register_op, rows, runs_triton


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_triton(x):
        return norm_reference(x, weight, bias, eps=eps, centred=centred)
    from autopar.kernels.gpu import normalisation as gpu

    out, _, mean, reciprocal = gpu.forward(x, None, weight, bias, eps=eps, centred=centred)
    return out, mean, reciprocal


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not runs_triton(x):
        total = (x + residual).contiguous()
        out, mean, reciprocal = norm_reference(total, weight, bias, eps=eps, centred=centred)
        return out, total, mean, reciprocal
    from autopar.kernels.gpu import normalisation as gpu

    return gpu.forward(x, residual, weight, bias, eps=eps, centred=centred)


def _norm_backward(
    grad_out: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    reciprocal: Tensor,
    weight: Tensor | None,
    *,
    centred: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = (grad_out, grad_total, total, mean, reciprocal, weight)
    if not runs_triton(total):
        return norm_backward_reference(*arguments, centred=centred, has_bias=has_bias)
    from autopar.kernels.gpu import normalisation as gpu

    grad, *others = gpu.backward(*arguments, centred=centred, has_bias=has_bias)
    grad_weight, grad_bias = (mean.new_empty((0,)) if item is None else item for item in others)
    return grad, grad_weight, grad_bias


def _norm_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    _require_shapes(x, None, weight, bias)
    mean, reciprocal = (x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x)) for _ in range(2))
    return x.new_empty(x.shape), mean, reciprocal


def _add_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _require_shapes(x, residual, weight, bias)
    out, mean, reciprocal = _norm_fake(x, weight, bias, eps=eps, centred=centred)
    return out, x.new_empty(x.shape), mean, reciprocal


def _norm_backward_fake(
    grad_out: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    reciprocal: Tensor,
    weight: Tensor | None,
    *,
    centred: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = total.shape[-1]
    grad_weight, grad_bias = (mean.new_empty((columns if there else 0,)) for there in (weight is not None, has_bias))
    return total.new_empty(total.shape), grad_weight, grad_bias


def _require_shapes(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"a residual {tuple(residual.shape)} of {residual.dtype} cannot be added to {tuple(x.shape)} of {x.dtype}")
    for name, item in (("weight", weight), ("bias", bias)):
        if item is not None and item.shape != x.shape[-1:]:
            raise ValueError(f"a norm's {name} is {tuple(item.shape)}, and its rows have {x.shape[-1]} columns")


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    """For both ops: the sum that is normalised is result 1 of `add_norm` and argument 0 of `norm`."""
    weight, bias = inputs[-2:]
    total = inputs[0] if len(output) == 3 else output[1]
    ctx.mark_non_differentiable(*output[-2:])
    ctx.save_for_backward(total, *output[-2:], weight)
    ctx.centred, ctx.bias_dtype = keyword_only_inputs["centred"], None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, weight and bias; a result that nothing reads has no gradient."""
    total, mean, reciprocal, weight = ctx.saved_tensors
    if grad_out is None:
        return grad_total, None, None
    options = {"centred": ctx.centred, "has_bias": ctx.bias_dtype is not None}
    grad, grad_weight, grad_bias = norm_backward(grad_out, grad_total, total, mean, reciprocal, weight, **options)
    return grad, grad_weight.to(weight.dtype) if weight is not None else None, grad_bias.to(ctx.bias_dtype) if ctx.bias_dtype else None


def _differentiate_norm(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, grad_out, None)


def _differentiate_add_norm(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grad, grad_weight, grad_bias = _gradients(ctx, grad_out, grad_total)
    return grad, grad, grad_weight, grad_bias


def _norm_rule(x: Shape, weight: Shape | None, bias: Shape | None, **_: Any) -> SplitRule:
    labels = rows(x)
    return SplitRule((labels, (None,), (None,)), (labels, labels[:-1], labels[:-1]))


def _add_norm_rule(x: Shape, residual: Shape, weight: Shape | None, bias: Shape | None, **_: Any) -> SplitRule:
    labels = rows(x)
    return SplitRule((labels, labels, (None,), (None,)), (labels, labels, labels[:-1], labels[:-1]))


def _norm_backward_rule(grad_out: Shape, grad_total: Shape | None, total: Shape, *_: Shape | None, **__: Any) -> SplitRule:
    """The gradients of weight and bias are summed over rows."""
    labels = rows(total)
    arguments = (labels, labels, labels, labels[:-1], labels[:-1], (None,))
    return SplitRule(arguments, (labels, (None,), (None,)), linear=(frozenset({0, 1}),))


_OPTIONS = "Tensor? weight, Tensor? bias, *, float eps, bool centred"
register_op("norm", f"(Tensor x, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", _norm, _norm_fake, OpTraits(_norm_rule))
register_op(
    "add_norm",
    f"(Tensor x, Tensor residual, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _add_norm,
    _add_norm_fake,
    OpTraits(_add_norm_rule),
)
register_op(
    "norm_backward",
    "(Tensor grad_out, Tensor? grad_total, Tensor total, Tensor mean, Tensor reciprocal, Tensor? weight, *, bool centred, bool has_bias) "
    "-> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
    OpTraits(_norm_backward_rule),
)
torch.library.register_autograd("autopar::norm", _differentiate_norm, setup_context=_save)
torch.library.register_autograd("autopar::add_norm", _differentiate_add_norm, setup_context=_save)

norm = torch.ops.autopar.norm.default
add_norm = torch.ops.autopar.add_norm.default
norm_backward = torch.ops.autopar.norm_backward.default
DECOMPOSITIONS.update({norm: norm_decomposition, add_norm: add_norm_decomposition, norm_backward: norm_backward_decomposition})
