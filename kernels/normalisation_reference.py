"""Norms and their backward in ATen: what `autopar/kernels/normalisation.py` means, and what runs where Triton does not.

A centred norm is ATen's layer norm. Given a 16-bit x with a weight in float32 its CPU kernel keeps float32 statistics and makes no
copy in float32. Elsewhere x is copied, and in the backward, which would sum the gradient of the weight in 16 bits.

A norm that is not centred is written in as few passes over the rows as ops allow: mean squares are read off the rows' lengths, and
row sums with the weight are products with a vector. On CPU it takes some rows at a time, so that what is between stays in the
cache: for [4096, 768] that halves the time of the backward.

A compiler that fuses is given the formulas as they are (`DECOMPOSITIONS` in `registration.py`): the kernel of a layer norm would be a
call to it, and rows it takes one by one by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.kernels.registration import accumulation_dtype, as_dtype

aten = torch.ops.aten

_BLOCK_ELEMENTS = 1 << 18


def norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, mean, reciprocal)."""
    exact = accumulation_dtype(x)
    weight, bias = weight if weight is None else as_dtype(weight, exact), bias if bias is None else as_dtype(bias, exact)
    if centred:
        value = x if x.is_cpu else as_dtype(x, exact)
        if weight is None and (bias is not None or value.dtype != exact):
            weight = x.new_ones(x.shape[-1:], dtype=exact)
        out, mean, reciprocal = torch.native_layer_norm(value, x.shape[-1:], weight, bias, eps)
        return as_dtype(out, x.dtype), mean.squeeze(-1), reciprocal.squeeze(-1)
    out, reciprocal = _rms_norm(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight, bias, eps)
    reciprocal = reciprocal.reshape(x.shape[:-1])
    return out.reshape(x.shape), torch.zeros_like(reciprocal), reciprocal


def norm_backward_reference(
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
    """Gradients of x, weight and bias; of the latter two in the dtype of `mean`."""
    scale = None if weight is None else as_dtype(weight, mean.dtype)
    arguments = (grad_out, grad_total, total, mean, reciprocal, scale, has_bias)
    grad, grad_weight, grad_bias = _layer_norm_backward(*arguments) if centred else _rms_norm_backward(*arguments)
    return (
        as_dtype(grad, total.dtype).contiguous(),
        mean.new_empty((0,)) if weight is None or grad_weight is None else grad_weight,
        mean.new_empty((0,)) if not has_bias or grad_bias is None else grad_bias,
    )


def norm_decomposition(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, mean, reciprocal) by the formulas of `normalisation.py`."""
    value = x.to(accumulation_dtype(x))
    if centred:
        variance, mean = torch.var_mean(value, -1, correction=0, keepdim=True)
        value = value - mean
    else:
        variance = value.square().mean(-1, keepdim=True)
        mean = torch.zeros_like(variance)
    reciprocal = torch.rsqrt(variance + eps)
    out = value * reciprocal
    out = out if weight is None else out * weight.to(out.dtype)
    out = out if bias is None else out + bias.to(out.dtype)
    return out.to(x.dtype).contiguous(), mean.squeeze(-1).contiguous(), reciprocal.squeeze(-1).contiguous()


def add_norm_decomposition(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, total, mean, reciprocal) by the formulas of `normalisation.py`."""
    total = (x + residual).contiguous()
    out, mean, reciprocal = norm_decomposition(total, weight, bias, eps=eps, centred=centred)
    return out, total, mean, reciprocal


def norm_backward_decomposition(
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
    """Gradients of x, weight and bias by the formulas of `normalisation.py`."""
    exact, scale, nothing = mean.dtype, reciprocal.unsqueeze(-1), mean.new_empty((0,))
    arrives, normalised = grad_out.to(exact), (total.to(exact) - mean.unsqueeze(-1)) * scale
    through = arrives if weight is None else arrives * weight.to(exact)
    grad = through - normalised * (through * normalised).mean(-1, keepdim=True)
    grad = (grad - through.mean(-1, keepdim=True) if centred else grad) * scale
    grad = grad if grad_total is None else grad + grad_total
    by_rows = (-1, total.shape[-1])
    return (
        grad.to(total.dtype).contiguous(),
        nothing if weight is None else (arrives * normalised).reshape(by_rows).sum(0),
        arrives.reshape(by_rows).sum(0) if has_bias else nothing,
    )


Gradients = tuple[Tensor, Tensor | None, Tensor | None]


def _layer_norm_backward(
    grad_out: Tensor, grad_total: Tensor | None, total: Tensor, mean: Tensor, reciprocal: Tensor, weight: Tensor | None, has_bias: bool
) -> Gradients:
    """The op reads memory as if all were contiguous."""
    exact, columns = mean.dtype, total.shape[-1:]
    wanted = [True, weight is not None, has_bias]
    if weight is None and has_bias:
        weight = total.new_ones(columns, dtype=exact)
    statistics = [item.contiguous().unsqueeze(-1) for item in (mean, reciprocal)]
    bias = weight if has_bias else None  # of which its op reads the shape alone
    contiguous = (as_dtype(grad_out, exact).contiguous(), as_dtype(total, exact).contiguous())
    grad, *others = aten.native_layer_norm_backward.default(*contiguous, columns, *statistics, weight, bias, wanted)
    return grad if grad_total is None else grad.add_(grad_total), others[0], others[1]


def _rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(out[R, N], reciprocal[R, 1]) of x[R, N]."""
    exact, columns = accumulation_dtype(x), x.shape[1]
    out, reciprocal = x.new_empty(x.shape), x.new_empty((x.shape[0], 1), dtype=exact)
    for rows in _blocks(x):
        lengths = torch.linalg.vector_norm(x[rows], dim=-1, keepdim=True, dtype=exact)
        reciprocal[rows] = scale = lengths.square_().div_(columns).add_(eps).rsqrt_()
        made = torch.mul(x[rows], scale, out=out[rows] if x.dtype == exact else None)
        made = made if weight is None else made.mul_(weight)
        made = made if bias is None else made.add_(bias)
        if x.dtype != exact:
            out[rows] = made
    return out, reciprocal


def _rms_norm_backward(
    grad_out: Tensor, grad_total: Tensor | None, total: Tensor, _mean: Tensor, reciprocal: Tensor, weight: Tensor | None, has_bias: bool
) -> Gradients:
    exact, whole, columns = reciprocal.dtype, total.shape, total.shape[-1]
    shape = (reciprocal.numel(), columns)
    grad_out, total, reciprocal = grad_out.reshape(shape), total.reshape(shape), reciprocal.reshape(-1, 1)
    others = None if grad_total is None else grad_total.reshape(shape)
    grad = total.new_empty(shape)
    grad_weight, grad_bias = (reciprocal.new_zeros((columns,)) if there else None for there in (weight is not None, has_bias))
    for rows in _blocks(total):
        arrives, scale = grad_out[rows].to(exact), reciprocal[rows]
        normalised = total[rows] * scale
        product = arrives * normalised
        if grad_bias is not None:
            grad_bias += arrives.sum(0)
        if weight is None or grad_weight is None:
            along, made = product.sum(1, keepdim=True), arrives.clone()
        else:
            grad_weight += product.sum(0)
            along, made = torch.mv(product, weight).unsqueeze(1), arrives * weight
        made = made.addcmul_(normalised, along, value=-1.0 / columns).mul_(scale)
        grad[rows] = made if others is None else made.add_(others[rows])
    return grad.reshape(whole), grad_weight, grad_bias


def _blocks(value: Tensor) -> Iterator[slice]:
    """Rows of [R, N] that are taken together: on CPU as many as the cache holds, elsewhere all."""
    count, columns = value.shape
    step = max(1, _BLOCK_ELEMENTS // max(1, columns)) if value.device.type == "cpu" else max(1, count)
    return (slice(start, start + step) for start in range(0, count, step))
