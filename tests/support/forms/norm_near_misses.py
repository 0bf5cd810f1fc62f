"""What looks like a norm and is none, or none that the op computes: each with a part of the reason that the pass gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.norm import EPS, B, N, S, form


def scale(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


@form("eps outside the root", reason="eps is added outside the root")
def _(m: Any) -> Tensor:
    return m.weight * m.x / (m.x.pow(2).mean(-1, keepdim=True).sqrt() + EPS)


@form("annotated transformer", reason="eps is added outside the root")
def _(m: Any) -> Tensor:
    return m.weight * (m.x - m.x.mean(-1, keepdim=True)) / (m.x.std(-1, keepdim=True) + EPS) + m.bias


@form("over the standard deviation", reason="a standard deviation has no eps")
def _(m: Any) -> Tensor:
    return (m.x - m.x.mean(-1, keepdim=True)) / m.x.std(-1, keepdim=True, unbiased=False)


@form("unbiased variance", reason="the variance is unbiased: a sum divided by N - 1")
def _(m: Any) -> Tensor:
    return (m.x - m.x.mean(-1, keepdim=True)) / torch.sqrt(m.x.var(-1, keepdim=True) + EPS)


@form("over rows", reason="the mean runs over dims [1] of 3")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.pow(2).mean(1, keepdim=True) + EPS)


@form("over two dims", reason="the mean runs over dims [1, 2] of 3")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.pow(2).mean((1, 2), keepdim=True) + EPS)


@form("over all", reason="the mean runs over dims [0, 1, 2] of 3")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.pow(2).mean() + EPS)


@form("mean not kept", reason="does not keep its dim", x=(N, N))
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.pow(2).mean(-1) + EPS)


@form("another value is measured", reason="the mean of squares is of another value than is scaled")
def _(m: Any) -> Tensor:
    return m.x * scale(m.residual)


@form("a shifted value is scaled", reason="the mean of squares is of another value than is scaled")
def _(m: Any) -> Tensor:
    return (m.x + 1.0) * scale(m.x)


@form("the variance of what is not centred", reason="from which the mean is not subtracted")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.var(-1, keepdim=True, unbiased=False) + EPS)


@form("multiplied by the root", reason="multiplied by the root")
def _(m: Any) -> Tensor:
    return m.x * torch.sqrt(m.x.pow(2).mean(-1, keepdim=True) + EPS)


@form("F.normalize", reason="a floor instead of an eps")
def _(m: Any) -> Tensor:
    return F.normalize(m.x, dim=-1) * N**0.5 * m.weight


@form("over its length", reason="a root of a sum of squares, not of their mean")
def _(m: Any) -> Tensor:
    return m.x / m.x.norm(2, dim=-1, keepdim=True)


@form("a sum of squares", reason="the root is of a sum of squares, not of their mean")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt((m.x * m.x).sum(-1, keepdim=True) + EPS)


@form("a sum over another number", reason="the sum of squares is divided by 7, and a row has 8 elements")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.square().sum(-1, keepdim=True) / 7 + EPS)


@form("a floor of the mean", reason="the mean of squares has a floor")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.square().mean(-1, keepdim=True).clamp(min=EPS))


@form("eps is learned", reason="not known before the program runs", eps=(1,))
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.square().mean(-1, keepdim=True) + m.eps.exp())


@form("eps below zero", reason="eps is -1e-05")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(m.x.square().mean(-1, keepdim=True) + -EPS)


@form("a difference of two means", reason="a difference of two means")
def _(m: Any) -> Tensor:
    mean = m.x.mean(-1, keepdim=True)
    return (m.x - mean) * torch.rsqrt(m.x.square().mean(-1, keepdim=True) - mean.square() + EPS)


@form("scaled in place", reason="the value is scaled in place, by mul_")
def _(m: Any) -> Tensor:
    x = m.x * 2
    return x.mul_(scale(x))


@form("written in between", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    memory = m.x * 2
    x = memory.view(B, S, N)
    bound = scale(x)
    memory.add_(1.0)
    return x * bound


@form("no gradient through the scale", reason="the root goes through detach")
def _(m: Any) -> Tensor:
    return m.x * scale(m.x).detach()


@form("integers", reason="the value is of torch.int64")
def _(m: Any) -> Tensor:
    x = (m.x * 5).long()
    return x * scale(x.float()) + 0 * m.x


@form("complex numbers", reason="the value is of torch.complex128")
def _(m: Any) -> Tensor:
    x = torch.complex(m.x.double(), m.residual.double())
    return (x * torch.rsqrt(x.abs().square().mean(-1, keepdim=True) + EPS)).abs()


@form("two dims at once", reason="it runs over the last 2 dims")
def _(m: Any) -> Tensor:
    return F.layer_norm(m.x, (S, N))


@form("statistics are read", reason="its mean or its deviation is read")
def _(m: Any) -> Tensor:
    out, mean, _ = torch.native_layer_norm(m.x, (N,), m.weight, m.bias, EPS)
    return out + mean


@form("the root broadcast to other rows", reason="the root goes through broadcast_to", x=(N, N))
def _(m: Any) -> Tensor:
    return m.x * torch.broadcast_to(torch.rsqrt(m.x.square().mean(-1) + EPS), m.x.shape)


@form("half of the mean subtracted", reason="another value than is scaled")
def _(m: Any) -> Tensor:
    centred = torch.subtract(m.x, m.x.mean(-1, keepdim=True), alpha=0.5)
    return centred * torch.rsqrt((m.x - m.x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + EPS)


@form("eps several times over", reason="not known before the program runs")
def _(m: Any) -> Tensor:
    return m.x * torch.rsqrt(torch.ops.aten.add.Scalar(m.x.square().mean(-1, keepdim=True), EPS, 3.0))
