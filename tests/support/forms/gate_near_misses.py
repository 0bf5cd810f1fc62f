"""What looks like a gate and is none, or none that the op computes: each with a part of the reason that the pass gives."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.gate import B, N, S, form


@form("activation read again", reason="its activation is used elsewhere")
def _(m: Any) -> Tensor:
    activated = F.silu(m.gate)
    return activated * m.up + activated


@form("one activation, two products", reason="its activation is used elsewhere", more=(B, S, N))
def _(m: Any) -> tuple[Tensor, Tensor]:
    activated = F.gelu(m.gate)
    return activated * m.up, activated * m.more


@form("activation is an output", reason="its activation is used elsewhere")
def _(m: Any) -> tuple[Tensor, Tensor]:
    activated = torch.sigmoid(m.gate)
    return activated, activated * m.up


@form("a recurrent cell's update", reason="its activation is used elsewhere")
def _(m: Any) -> Tensor:
    update = torch.sigmoid(m.gate)
    return (1 - update) * m.up + update * m.up.tanh()


@form("a gate for every channel", reason="one is broadcast: the gate is [2, 1, 8]", gate=(B, 1, N))
def _(m: Any) -> Tensor:
    return m.up * torch.sigmoid(m.gate)


@form("a gate for every token", reason="one is broadcast: the gate is [2, 5, 1]", gate=(B, S, 1))
def _(m: Any) -> Tensor:
    return torch.sigmoid(m.gate) * m.up


@form("a scale of the layer", reason="one is broadcast", up=(N,))
def _(m: Any) -> Tensor:
    return F.gelu(m.gate) * m.up


@form("tanh", reason="tanh is none of silu")
def _(m: Any) -> Tensor:
    return torch.tanh(m.gate) * m.up


@form("elu", reason="elu is none of silu")
def _(m: Any) -> Tensor:
    return F.elu(m.gate) * m.up


@form("hardswish", reason="hardswish is none of silu")
def _(m: Any) -> Tensor:
    return m.up * F.hardswish(m.gate)


@form("clamped below", reason="clamp(min=...) is none of silu")
def _(m: Any) -> Tensor:
    return m.gate.clamp_min(0) * m.up


@form("relu, squared", reason="it gates its own value")
def _(m: Any) -> Tensor:
    activated = torch.relu(m.gate)
    return activated * activated


@form("gelu with other constants", reason="its activation is not gelu_tanh")
def _(m: Any) -> Tensor:
    x = m.gate
    return 0.5 * x * (1.0 + torch.tanh(0.79788 * (x + 0.044715 * x * x * x))) * m.up


@form("gelu of another erf", reason="its activation is not gelu: 0.707", gate=(B, S, N))
def _(m: Any) -> Tensor:
    return 0.5 * m.gate * (1 + torch.erf(m.gate * 0.707)) * m.up


@form("a mask of bits", reason="what it gates of torch.bool")
def _(m: Any) -> Tensor:
    return torch.sigmoid(m.gate) * (m.up > 0)


@form("in place, read before it is overwritten for another", reason="writes in place into a value that is read elsewhere")
def _(m: Any) -> Tensor:
    doubled = m.gate.view(B * S, N)
    return (F.silu(m.gate, inplace=True) * m.up).sum() + doubled.sum()


@form("gate overwritten before the product", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    activated = F.silu(m.gate)
    m.gate.add_(1)
    return activated * m.up + m.gate


@form("a wider copy overwritten before the product", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    wide = m.up.float().double()
    wide.view(-1).add_(1)
    return F.silu(m.gate) * wide


@form("product in place of what is read elsewhere", reason="writes in place into a value that is read elsewhere")
def _(m: Any) -> Tensor:
    other = m.up.view(-1)
    m.up.mul_(torch.sigmoid(m.gate))
    return other.sum() + m.up.sum()


@form("sum with the bias read again", reason="or the sum with the bias, is used elsewhere", bias=(N,))
def _(m: Any) -> Tensor:
    total = m.gate + m.bias
    return torch.relu(total) + total.exp()


@form("half of gelu's sum by hand", reason="or the sum with the bias, is used elsewhere", bias=(N,))
def _(m: Any) -> tuple[Tensor, Tensor]:
    total = m.gate + m.bias
    inner = torch.erf(total / math.sqrt(2))
    return 0.5 * total * (1 + inner), inner


@form("one added in place to what is read again", reason="its activation is used elsewhere")
def _(m: Any) -> Tensor:
    inner = torch.erf(m.gate / math.sqrt(2.0))
    return 0.5 * m.gate * torch.ops.aten.add_.Scalar(inner, 1.0) * m.up + inner


@form("one added in place to what a view shows", reason="its activation is used elsewhere")
def _(m: Any) -> Tensor:
    inner = torch.erf(m.gate / math.sqrt(2.0))
    seen = inner.flatten()
    return 0.5 * m.gate * torch.ops.aten.add_.Scalar(inner, 1.0) * m.up + seen.view(B, S, N)


@form("subtract, of the other sign", reason="its activation is not gelu_tanh")
def _(m: Any) -> Tensor:
    inner = torch.subtract(m.gate, m.gate.pow(3), alpha=0.044715)
    return m.gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * inner)) * 0.5 * m.up


@form("activation negated in place and read", reason="its activation is used elsewhere")
def _(m: Any) -> Tensor:
    activated = F.silu(m.gate)
    return activated.neg_() * m.up + activated


@form("the gate negated in place", reason="neg_.default writes into an operand in place")
def _(m: Any) -> Tensor:
    activated = torch.sigmoid(m.gate)
    m.gate.neg_()
    return activated * m.up + m.gate
