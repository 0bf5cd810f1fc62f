"""Ways in which people write gated activations and biased ones, one small module each, and the near misses.

Every form computes from a gate and an up [2, 5, 8], each a linear layer of an input, unless it says other shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.suite import Catalogue, Shape

B, S, N = 2, 5, 8


GATES = Catalogue()
aten = torch.ops.aten


def form(name: str, kind: str = "", *, reason: str = "", **shapes: Shape) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function as a form of `kind`, "silu gate" or "relu bias", or, with a reason, as a near miss."""
    activation, _, what = kind.partition(" ")
    found = rf"^{'biased activation' if what == 'bias' else what} at .* fused: {activation}\b"
    says = re.escape(reason) if reason else found
    return GATES.adds(name, {"gate": (B, S, N), "up": (B, S, N)} | shapes, (says,), bool(reason))


# The five, by name.


@form("silu, gate first", "silu gate")
def _(m: Any) -> Tensor:
    return F.silu(m.gate) * m.up


@form("silu, gate last", "silu gate")
def _(m: Any) -> Tensor:
    return m.up * F.silu(m.gate)


@form("gelu", "gelu gate")
def _(m: Any) -> Tensor:
    return F.gelu(m.gate).mul(m.up)


@form("gelu by tanh", "gelu_tanh gate")
def _(m: Any) -> Tensor:
    return F.gelu(m.gate, approximate="tanh") * m.up


@form("relu", "relu gate")
def _(m: Any) -> Tensor:
    return m.up * torch.relu(m.gate)


@form("sigmoid", "sigmoid gate")
def _(m: Any) -> Tensor:
    return torch.sigmoid(m.gate) * m.up


@form("glu", "sigmoid gate", gate=(B, S, 2 * N))
def _(m: Any) -> Tensor:
    return F.glu(m.gate)


@form("glu over another dim", "sigmoid gate", gate=(B, 6, N))
def _(m: Any) -> Tensor:
    return F.glu(m.gate, dim=1)


@form("sigmoid of a cell", "sigmoid gate")
def _(m: Any) -> Tensor:
    return torch.sigmoid(m.gate) * torch.tanh(m.up)


# Written by hand.


@form("silu by hand", "silu gate")
def _(m: Any) -> Tensor:
    return m.gate * torch.sigmoid(m.gate) * m.up


@form("silu by hand, sigmoid first", "silu gate")
def _(m: Any) -> Tensor:
    return m.up * (m.gate.sigmoid() * m.gate)


@form("silu by hand, taken apart", "silu gate")
def _(m: Any) -> Tensor:
    return (m.up * m.gate) * torch.sigmoid(m.gate)


@form("silu by hand, sigmoid with what it gates", "silu gate")
def _(m: Any) -> Tensor:
    return m.gate * (m.gate.sigmoid() * m.up)


@form("silu as a quotient", "silu gate")
def _(m: Any) -> Tensor:
    return m.gate / (1 + torch.exp(-m.gate)) * m.up


@form("sigmoid as a quotient", "sigmoid gate")
def _(m: Any) -> Tensor:
    return m.up * (1.0 / (1.0 + torch.exp(-m.gate)))


@form("a quotient with sigmoid's", "sigmoid gate")
def _(m: Any) -> Tensor:
    return m.up / (torch.exp(-m.gate) + 1)


@form("gelu by erf", "gelu gate")
def _(m: Any) -> Tensor:
    return 0.5 * m.gate * (1 + torch.erf(m.gate / math.sqrt(2))) * m.up


@form("gelu by erf, halves inside", "gelu gate")
def _(m: Any) -> Tensor:
    return m.up * (m.gate * (0.5 + 0.5 * torch.erf(m.gate * 0.7071067811865476)))


@form("gelu by erf, the half last", "gelu gate")
def _(m: Any) -> Tensor:
    return m.gate * (1.0 + torch.special.erf(m.gate * 2.0**-0.5)) * 0.5 * m.up


@form("gelu by tanh and pow", "gelu_tanh gate")
def _(m: Any) -> Tensor:
    x = m.gate
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))) * m.up


@form("gelu by tanh and products", "gelu_tanh gate")
def _(m: Any) -> Tensor:
    x = m.gate
    return m.up * (0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))))


@form("gelu by tanh and a square", "gelu_tanh gate")
def _(m: Any) -> Tensor:
    x = m.gate
    inner = math.sqrt(2 / math.pi) * x.add(0.044715 * x.square() * x)
    return (x * (torch.tanh(inner) + 1) / 2) * m.up


# Where gate and up come from.


@form("two linear layers", "silu gate", x=(B, S, 6), gate=(N, 6), up=(N, 6))
def _(m: Any) -> Tensor:
    return F.silu(F.linear(m.x, m.gate)) * F.linear(m.x, m.up)


@form("chunks", "silu gate", gate=(B, S, 2 * N))
def _(m: Any) -> Tensor:
    gate, up = m.gate.chunk(2, dim=-1)
    return F.silu(gate) * up


@form("chunks, the other way round", "gelu gate", gate=(B, S, 2 * N))
def _(m: Any) -> Tensor:
    up, gate = m.gate.chunk(2, dim=-1)
    return up * F.gelu(gate)


@form("a split", "relu gate", gate=(B, S, 2 * N))
def _(m: Any) -> Tensor:
    gate, up = m.gate.split([N, N], dim=-1)
    return torch.relu(gate) * up


@form("slices", "silu gate", gate=(B, S, 2 * N))
def _(m: Any) -> Tensor:
    return F.silu(m.gate[..., :N]) * m.gate[..., N:]


@form("interleaved", "silu gate", gate=(B, S, 2 * N))
def _(m: Any) -> Tensor:
    return F.silu(m.gate[..., ::2]) * m.gate[..., 1::2]


@form("selected", "silu gate", gate=(B, S, 2, N))
def _(m: Any) -> Tensor:
    return F.silu(m.gate[:, :, 0]) * m.gate[:, :, 1]


@form("unbound", "silu gate", gate=(2, B, S, N))
def _(m: Any) -> Tensor:
    gate, up = m.gate.unbind(0)
    return F.silu(gate) * up


@form("transposed", "silu gate", gate=(B, N, S))
def _(m: Any) -> Tensor:
    return (F.silu(m.gate.mT) * m.up).view(B, S, N)


@form("batched experts", "silu gate", x=(3, 4, 6), gate=(3, 6, N), up=(3, 6, N))
def _(m: Any) -> Tensor:
    return F.silu(torch.bmm(m.x, m.gate)) * torch.bmm(m.x, m.up)


@form("rows", "silu gate", gate=(B * S, N), up=(B * S, N))
def _(m: Any) -> Tensor:
    return F.silu(m.gate) * m.up


@form("of itself", "silu gate")
def _(m: Any) -> Tensor:
    return F.silu(m.gate) * m.gate


@form("of itself, half of it", "sigmoid gate")
def _(m: Any) -> Tensor:
    return m.gate * torch.sigmoid(1.702 * m.gate)


@form("two activations", "silu gate")
def _(m: Any) -> Tensor:
    return F.silu(m.gate) * F.gelu(m.up)


@form("times a number", "silu gate")
def _(m: Any) -> Tensor:
    return (2.5 * F.silu(m.gate)) * m.up


@form("what is gated is a product", "gelu gate", more=(B, S, N))
def _(m: Any) -> Tensor:
    return F.gelu(m.gate) * (m.up * m.more)


@form("negative", "sigmoid gate")
def _(m: Any) -> Tensor:
    return -torch.sigmoid(m.gate) * m.up


# In place.


@form("silu in place", "silu gate")
def _(m: Any) -> Tensor:
    return F.silu(m.gate, inplace=True) * m.up


@form("in place, a view", "silu gate", up=(B * S, N))
def _(m: Any) -> Tensor:
    return F.silu(m.gate.view(B * S, N), inplace=True) * m.up


@form("product in place", "silu gate")
def _(m: Any) -> Tensor:
    return F.silu(m.gate).mul_(m.up)


@form("product in place of what is gated", "sigmoid gate")
def _(m: Any) -> Tensor:
    m.up *= torch.sigmoid(m.gate)
    return m.up


# In other dtypes inside.


@form("float32 inside", "silu gate")
def _(m: Any) -> Tensor:
    return (F.silu(m.gate.float()) * m.up.float()).to(m.up.dtype)


@form("the gate alone in float32", "silu gate")
def _(m: Any) -> Tensor:
    return F.silu(m.gate.float()).to(m.up.dtype) * m.up


@form("unequal dtypes", "gelu gate")
def _(m: Any) -> Tensor:
    return F.gelu(m.gate) * m.up.double()


@form("float32 inside, by hand", "silu gate")
def _(m: Any) -> Tensor:
    return (m.gate * torch.sigmoid(m.gate.float())).to(m.up.dtype) * m.up


# Activations of a sum with a bias.


@form("bias and relu", "relu bias", bias=(N,))
def _(m: Any) -> Tensor:
    return torch.relu(m.gate + m.bias)


@form("bias first, gelu", "gelu bias", bias=(N,))
def _(m: Any) -> Tensor:
    return F.gelu(m.bias + m.gate)


@form("bias and silu in place", "silu bias", bias=(N,))
def _(m: Any) -> Tensor:
    return F.silu(m.gate + m.bias, inplace=True)


@form("bias with leading dims, sigmoid", "sigmoid bias", bias=(1, 1, N))
def _(m: Any) -> Tensor:
    return torch.sigmoid(m.gate + m.bias)


@form("bias of rows, gelu by tanh", "gelu_tanh bias", gate=(B * S, N), bias=(N,))
def _(m: Any) -> Tensor:
    return F.gelu(m.gate + m.bias, approximate="tanh")


@form("bias and gelu by hand", "gelu_tanh bias", bias=(N,))
def _(m: Any) -> Tensor:
    x = m.gate + m.bias
    return x * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))


@form("bias added in place", "silu bias", bias=(N,))
def _(m: Any) -> Tensor:
    return F.silu(m.gate.add_(m.bias))


@form("bias in float32", "gelu bias", bias=(N,))
def _(m: Any) -> Tensor:
    return F.gelu((m.gate + m.bias).float()).to(m.gate.dtype)


# In place, and by names that torch has beside the usual ones.


@form("gelu by erf, one added in place", "gelu gate")
def _(m: Any) -> Tensor:
    return 0.5 * m.gate * aten.add_.Scalar(torch.erf(m.gate / math.sqrt(2.0)), 1.0) * m.up


@form("gelu by tanh and subtract", "gelu_tanh gate")
def _(m: Any) -> Tensor:
    inner = torch.subtract(m.gate, m.gate.pow(3), alpha=-0.044715)
    return m.gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * inner)) * 0.5 * m.up


@form("gelu by tanh and a difference with a factor", "gelu_tanh gate")
def _(m: Any) -> Tensor:
    inner = m.gate * aten.sub.Scalar(0.044715 * m.gate.square(), 0.5, -2.0)
    return m.gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * inner)) * 0.5 * m.up


@form("activation negated in place", "silu gate")
def _(m: Any) -> Tensor:
    return F.silu(m.gate).neg_() * m.up


@form("multiplied and divided by other names", "sigmoid gate")
def _(m: Any) -> Tensor:
    return torch.multiply(torch.divide(torch.sigmoid(m.gate), 4.0), m.up)
