"""Rotary position embedding (Su et al., 2021) of heads, as one op of ours, with its backward as a second one.

    out₁ = x₁ · cos₁ − x₂ · sin₁        out₂ = x₂ · cos₂ + x₁ · sin₂
    dx₁  = d₁ · cos₁ + d₂ · sin₂        dx₂  = d₂ · cos₂ − d₁ · sin₁

x is [B, H, S, D]; cos and sin broadcast to [B, H, S, R], R even and at most D: only the first R elements turn. 1 and 2 are the
halves of these, or, `interleaved`, their even and odd elements; nothing is assumed of cos₁ and cos₂ being equal. Computed in
float32 (float64 for float64) and rounded once. The result lies in memory as [B, S, H, D], as attention's results do.
"""

from __future__ import annotations

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


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The op in plain ops."""
    return _turned(x, cos, sin, interleaved, backward=False)


def rotary_backward_reference(grad_out: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The gradient of x in plain ops."""
    return _turned(grad_out, cos, sin, interleaved, backward=True)


def rotary_decomposition(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The op, put together from its parts."""
    return _put_together(x, cos, sin, interleaved, backward=False)


def rotary_backward_decomposition(grad_out: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The gradient of x, put together from its parts."""
    return _put_together(grad_out, cos, sin, interleaved, backward=True)


def _put_together(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    exact, rotated = accumulation_dtype(x), cos.shape[-1]
    turning, rest = x.transpose(1, 2).split((rotated, x.shape[-1] - rotated), -1)
    angles = (each.to(exact).expand(*x.shape[:-1], rotated).transpose(1, 2) for each in (cos, sin))
    (x_1, x_2), (cos_1, cos_2), (sin_1, sin_2) = (_parts(item, interleaved) for item in (turning.to(exact), *angles))
    sin_1, sin_2 = (sin_2, sin_1) if backward else (-sin_1, -sin_2)
    out_1, out_2 = x_1 * cos_1 + x_2 * sin_1, x_2 * cos_2 - x_1 * sin_2
    turned = torch.stack((out_1, out_2), -1).flatten(-2) if interleaved else torch.cat((out_1, out_2), -1)
    return torch.cat((turned.to(x.dtype), rest), -1).transpose(1, 2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    """Written where the result lies; only 16-bit elements go through memory of their own."""
    exact, rotated = accumulation_dtype(x), cos.shape[-1]
    batch, heads, length, size = x.shape
    out = x.new_empty((batch, length, heads, size)).transpose(1, 2)
    turning = x[..., :rotated].to(exact)
    made = out[..., :rotated] if x.dtype == exact else torch.empty_like(turning)
    torch.mul(turning, cos.to(exact), out=made)
    (x_1, x_2), (sin_1, sin_2), (out_1, out_2) = (_parts(item, interleaved) for item in (turning, sin.to(exact), made))
    out_1.addcmul_(x_2, sin_2 if backward else sin_1, value=1 if backward else -1)
    out_2.addcmul_(x_1, sin_1 if backward else sin_2, value=-1 if backward else 1)
    if made.dtype != out.dtype:
        out[..., :rotated].copy_(made)
    out[..., rotated:].copy_(x[..., rotated:])
    return out


def _parts(value: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return value[..., 0::2], value[..., 1::2]
    first, second = value.chunk(2, -1)
    return first, second


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    if not runs_triton(x):
        return rotary_reference(x, cos, sin, interleaved=interleaved)
    from autopar.kernels.gpu import rotary as gpu

    return gpu.rotate(x, cos, sin, interleaved=interleaved, backward=False)


def _rotary_backward(grad_out: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    if not runs_triton(grad_out):
        return rotary_backward_reference(grad_out, cos, sin, interleaved=interleaved)
    from autopar.kernels.gpu import rotary as gpu

    return gpu.rotate(grad_out, cos, sin, interleaved=interleaved, backward=True)


def _rotary_fake(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    fits = x.dim() == 4 and cos.shape == sin.shape and 2 <= cos.dim() <= 4 and cos.shape[-1] % 2 == 0 and cos.shape[-1] <= x.shape[-1]
    sizes = zip(reversed(cos.shape[:-1]), reversed(x.shape[:-1]), strict=False)
    if not fits or any(size not in (1, whole) for size, whole in sizes):
        shapes = f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise ValueError(f"rotary takes x [B, H, S, D] and cos, sin that broadcast to [B, H, S, R], R even and at most D; got {shapes}")
    batch, heads, length, size = x.shape
    return x.new_empty((batch, length, heads, size)).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    _, cos, sin = inputs
    if cos.requires_grad or sin.requires_grad:
        raise NotImplementedError("autopar::rotary has no gradient for cos and sin; write this rotation in plain ops")
    ctx.save_for_backward(cos, sin)
    ctx.options = keyword_only_inputs


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
    return rotary_backward(grad_out, *ctx.saved_tensors, **ctx.options), None, None


def _rotary_rule(x: Shape, cos: Shape, sin: Shape, **_: Any) -> SplitRule:
    """Of the op and of its backward, which takes a gradient in place of x."""
    labels = rows(x)
    of_angles = ((*broadcast(angle[:-1], labels[:-1], x[:-1]), None) for angle in (cos, sin))
    return SplitRule((labels, *of_angles), (labels,), linear=(frozenset({0}),))


_TRAITS = OpTraits(_rotary_rule, is_finite=True)


_OPTIONS = "Tensor cos, Tensor sin, *, bool interleaved"
register_op("rotary", f"(Tensor x, {_OPTIONS}) -> Tensor", _rotary, _rotary_fake, _TRAITS)
register_op("rotary_backward", f"(Tensor grad_out, {_OPTIONS}) -> Tensor", _rotary_backward, _rotary_fake, _TRAITS)
torch.library.register_autograd("autopar::rotary", _differentiate, setup_context=_save)

rotary = torch.ops.autopar.rotary.default
rotary_backward = torch.ops.autopar.rotary_backward.default
DECOMPOSITIONS[rotary], DECOMPOSITIONS[rotary_backward] = rotary_decomposition, rotary_backward_decomposition
