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

from autopar.kernels.registration import accumulation_dtype, register_op, runs_triton


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The op in plain ops."""
    (x_1, x_2), (cos_1, cos_2), (sin_1, sin_2) = (_parts(item, cos.shape[-1], interleaved, accumulation_dtype(x)) for item in (x, cos, sin))
    return _joined(x, cos.shape[-1], interleaved, x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2)


def rotary_backward_reference(grad_out: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The gradient of x in plain ops."""
    exact = accumulation_dtype(grad_out)
    (d_1, d_2), (cos_1, cos_2), (sin_1, sin_2) = (_parts(item, cos.shape[-1], interleaved, exact) for item in (grad_out, cos, sin))
    return _joined(grad_out, cos.shape[-1], interleaved, d_1 * cos_1 + d_2 * sin_2, d_2 * cos_2 - d_1 * sin_1)


def _parts(value: Tensor, rotated: int, interleaved: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turning = value[..., :rotated].to(dtype)
    if interleaved:
        return turning[..., 0::2], turning[..., 1::2]
    return turning[..., : rotated // 2], turning[..., rotated // 2 :]


def _joined(like: Tensor, rotated: int, interleaved: bool, first: Tensor, second: Tensor) -> Tensor:
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    whole = torch.cat((turned.to(like.dtype), like[..., rotated:]), -1)
    inside = whole.transpose(1, 2)
    return inside.reshape(-1).view(inside.shape).transpose(1, 2)


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


_OPTIONS = "Tensor cos, Tensor sin, *, bool interleaved"
register_op("rotary", f"(Tensor x, {_OPTIONS}) -> Tensor", _rotary, _rotary_fake)
register_op("rotary_backward", f"(Tensor grad_out, {_OPTIONS}) -> Tensor", _rotary_backward, _rotary_fake)
torch.library.register_autograd("autopar::rotary", _differentiate, setup_context=_save)

rotary = torch.ops.autopar.rotary.default
rotary_backward = torch.ops.autopar.rotary_backward.default
