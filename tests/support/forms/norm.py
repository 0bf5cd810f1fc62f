"""Ways in which people write norms, one small module each.

Every form computes from x and a residual [2, 5, 8], a weight and a bias [8], unless it says other shapes. The near misses are in
`tests/support/forms/norm_near_misses.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.suite import Catalogue, Shape

B, S, N = 2, 5, 8
EPS = 1e-5


NORMS = Catalogue()


def form(
    name: str, finds: str = "RMS norm, with a weight", *, reason: str = "", inside: bool = False, **shapes: Shape
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function as a form, of which the pass says `finds`, or, with a reason, as a near miss; `inside`: with the residual."""
    found = ".*".join(finds.split(", ")) + ("; residual added inside$" if inside else "$")
    whole = {"x": (B, S, N), "residual": (B, S, N), "weight": (N,), "bias": (N,)} | shapes
    return NORMS.adds(name, whole, (re.escape(reason) if reason else found,), bool(reason))


# RMS norms, as models write them.


@form("Llama")
def _(m: Any) -> Tensor:
    x = m.x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * x.to(m.x.dtype)


@form("T5: x itself is scaled by what was measured in float32")
def _(m: Any) -> Tensor:
    variance = m.x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return m.weight * (m.x * torch.rsqrt(variance + EPS)).to(m.weight.dtype)


@form("Gemma: one plus the weight, in float32")
def _(m: Any) -> Tensor:
    x = m.x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (x * (1.0 + m.weight.float())).type_as(m.x)


@form("Qwen: a norm of each head", q=(B, S, 2 * N))
def _(m: Any) -> Tensor:
    heads = m.q.view(B, S, 2, N).float()
    heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + EPS)
    return (m.weight * heads.to(m.q.dtype)).transpose(1, 2)


@form("of transposed heads, viewed after", q=(B, S, 2 * N))
def _(m: Any) -> Tensor:
    heads = m.q.view(B, S, 2, N).transpose(1, 2)
    heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + EPS) * m.weight
    return heads.transpose(1, 2).reshape(B, S, 2 * N) * 2.0


@form("weight in float32, result in float32")
def _(m: Any) -> Tensor:
    x = m.x.float()
    return m.weight.float() * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS))


@form("a narrow value, a wide weight", "RMS norm, with a weight")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.pow(2).mean(-1, keepdim=True) + EPS) * m.weight.float()


@form("no weight", "RMS norm, without a weight")
def _(m: Any) -> Tensor:
    return m.x * (m.x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()


@form("squares by x * x, over the root")
def _(m: Any) -> Tensor:
    return m.x / torch.sqrt((m.x * m.x).mean(dim=2, keepdim=True) + EPS) * m.weight


@form("times one over the root", "with a weight and a bias")
def _(m: Any) -> Tensor:
    return m.x * (1.0 / torch.sqrt(EPS + (m.x**2).mean(-1, True))) * m.weight + m.bias


@form("power of minus one half, eps as a tensor")
def _(m: Any) -> Tensor:
    return m.weight * (m.x * (m.x.pow(2).mean(-1, keepdim=True) + torch.tensor(EPS, dtype=torch.float64)) ** -0.5)


@form("sum over the number of columns")
def _(m: Any) -> Tensor:
    mean = (m.x**2).sum(-1, keepdim=True) / m.x.shape[-1]
    return m.x / (mean + EPS).pow(0.5) * m.weight


@form("sum times one over the number of columns")
def _(m: Any) -> Tensor:
    mean = m.x.square().sum(dim=(2,), keepdim=True) * (1.0 / N)
    return m.x * (mean + EPS).rsqrt() * m.weight


@form("mean not kept, put in again")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.square().mean(-1) + EPS).unsqueeze(-1) * m.weight


@form("mean indexed by None, expanded")
def _(m: Any) -> Tensor:
    scale = torch.rsqrt(m.x.square().mean(-1)[..., None] + EPS)
    return m.x * scale.expand_as(m.x) * m.weight


@form("reciprocal of the root")
def _(m: Any) -> Tensor:
    return torch.mul(torch.sqrt(m.x.square().mean(-1, keepdim=True) + EPS).reciprocal(), m.x) * m.weight


@form("weight before the root")
def _(m: Any) -> Tensor:
    return m.weight * m.x / torch.sqrt(m.x.square().mean(-1, keepdim=True) + EPS)


@form("weight with dims of size 1", weight=(1, 1, N))
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.square().mean(-1, keepdim=True) + EPS) * m.weight


@form("weight by head stays outside", "RMS norm, without a weight", q=(B, 4, S, N), heads=(4, 1, N))
def _(m: Any) -> Tensor:
    return m.q * torch.rsqrt(m.q.square().mean(-1, keepdim=True) + EPS) * m.heads


@form("one row", x=(N,))
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.square().mean() + EPS) * m.weight


@form("the normalised value is read twice", "RMS norm, without a weight")
def _(m: Any) -> Tensor:
    x = m.x * torch.rsqrt(m.x.square().mean(-1, keepdim=True) + EPS)
    return x * m.weight + x.sin()


@form("the root is read, too")
def _(m: Any) -> Tensor:
    scale = torch.rsqrt(m.x.square().mean(-1, keepdim=True) + EPS)
    return m.x * scale * m.weight + scale


@form("no eps", "eps 0, with a weight")
def _(m: Any) -> Tensor:
    return m.x * m.x.square().mean(-1, keepdim=True).rsqrt() * m.weight


@form("the root broadcast")
def _(m: Any) -> Tensor:
    scale = torch.rsqrt(m.x.square().mean(-1, keepdim=True) + EPS)
    return m.x * torch.broadcast_to(scale, m.x.shape) * m.weight


@form("centred by subtract, over the root by divide", "layer norm, with a weight")
def _(m: Any) -> Tensor:
    centred = torch.subtract(m.x, m.x.mean(-1, keepdim=True))
    return torch.multiply(torch.divide(centred, torch.sqrt(centred.square().mean(-1, keepdim=True) + EPS)), m.weight)


@form("F.rms_norm")
def _(m: Any) -> Tensor:
    return F.rms_norm(m.x, (N,), m.weight, EPS)


@form("F.rms_norm, its own eps", "RMS norm, without a weight")
def _(m: Any) -> Tensor:
    return F.rms_norm(m.x, (N,))


# Layer norms.


@form("F.layer_norm", "layer norm, with a weight and a bias")
def _(m: Any) -> Tensor:
    return F.layer_norm(m.x, (N,), m.weight, m.bias, EPS)


@form("F.layer_norm without weight, then modulated", "layer norm, with a weight and a bias")
def _(m: Any) -> Tensor:
    return F.layer_norm(m.x, (N,), eps=EPS) * (1 + m.weight) + m.bias


@form("F.layer_norm without bias", "layer norm, with a weight")
def _(m: Any) -> Tensor:
    return F.layer_norm(m.x, (N,), m.weight, None, EPS)


@form("F.layer_norm in float32", "layer norm, with a weight and a bias")
def _(m: Any) -> Tensor:
    return F.layer_norm(m.x.float(), (N,), m.weight.float(), m.bias.float(), EPS).to(m.x.dtype)


@form("native_layer_norm", "layer norm, with a weight and a bias")
def _(m: Any) -> Tensor:
    return torch.native_layer_norm(m.x, (N,), m.weight, m.bias, EPS)[0]


@form("layer norm by mean and squares", "layer norm, with a weight and a bias")
def _(m: Any) -> Tensor:
    centred = m.x - m.x.mean(-1, keepdim=True)
    return m.weight * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS)) + m.bias


@form("layer norm by var", "layer norm, with a weight and a bias")
def _(m: Any) -> Tensor:
    mean, variance = m.x.mean(-1, keepdim=True), m.x.var(-1, keepdim=True, unbiased=False)
    return m.weight * (m.x - mean) / torch.sqrt(variance + EPS) + m.bias


@form("layer norm by var_mean", "layer norm, without a weight")
def _(m: Any) -> Tensor:
    variance, mean = torch.var_mean(m.x, dim=-1, keepdim=True, correction=0)
    return (m.x - mean) * (variance + EPS).rsqrt()


@form("layer norm, the difference written twice", "layer norm, with a weight")
def _(m: Any) -> Tensor:
    mean = m.x.float().mean(-1, keepdim=True)
    variance = (m.x.float() - mean).square().mean(-1, keepdim=True)
    return ((m.x.float() - mean) / torch.sqrt(variance + EPS)).to(m.x.dtype) * m.weight


# Sums.


@form("a residual", inside=True)
def _(m: Any) -> Tensor:
    total = m.x + m.residual
    x = total.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return total.sin() + m.weight * x.to(m.x.dtype)


@form("a residual, the sum read before the norm", "layer norm, with a weight and a bias", inside=True)
def _(m: Any) -> Tensor:
    weight, bias, total = m.weight, m.bias, m.x + m.residual
    return total.sin() + F.layer_norm(total, (N,), weight, bias, EPS)


@form("a residual, read by nobody else", "layer norm, with a weight and a bias", inside=True)
def _(m: Any) -> Tensor:
    return F.layer_norm(m.residual + m.x, (N,), m.weight, m.bias, EPS)


@form("a sum that is broadcast stays outside", row=(S, N))
def _(m: Any) -> Tensor:
    return F.rms_norm(m.x + m.row, (N,), m.weight, EPS)


@form("a scaled residual stays outside")
def _(m: Any) -> Tensor:
    return F.rms_norm(torch.add(m.x, m.residual, alpha=2), (N,), m.weight, EPS)
