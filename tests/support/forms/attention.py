"""Ways in which people write attention, one small module each, and the near misses.

Every form computes from a query [2, 4, 6, 8], a key and a value [2, 4, 7, 8], unless it says others, and from a batch of
inputs, such as a mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.suite import Catalogue, Form, Inputs, Shape

B, H, S, T, D = 2, 4, 6, 7, 8
QUERY, KEY = (B, H, S, D), (B, H, T, D)
SQUARE = {"query": (B, H, S, D), "key": (B, H, S, D)}
# Of every dtype in which the forms run.
LOWEST = torch.finfo(torch.bfloat16).min


ATTENTIONS = Catalogue()
TRIANGLE = {"triangle": torch.ones(16, 16, dtype=torch.float64).tril()}


def form(
    name: str, *, inputs: Callable[[], Inputs] = tuple, reason: str = "", **shapes: Shape
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function as a form, or, with a reason, as a near miss."""
    whole = {"query": QUERY, "key": KEY} | {"value": shapes.get("key", KEY)} | shapes
    return ATTENTIONS.adds(name, whole, (re.escape(reason),), bool(reason), inputs=inputs, tables=TRIANGLE)


def attending(compute: Callable[..., Any], **shapes: Shape) -> Form:
    """One more that is not in the table, of the usual shapes where it says no others."""
    return Form("", compute, shapes or {"query": QUERY, "key": KEY, "value": KEY})


def padding() -> tuple[Tensor, ...]:
    """bool [B, T], true where a key counts; each row has one, and the first rows of no sample."""
    return (torch.arange(T) < torch.tensor([[T], [3]]),)


def square_padding() -> tuple[Tensor, ...]:
    return (torch.arange(S) < torch.tensor([[S], [4]]),)


def some_empty() -> tuple[Tensor, ...]:
    """bool [B, T] of which the second sample masks every key."""
    return (torch.arange(T) < torch.tensor([[4], [0]]),)


def added() -> tuple[Tensor, ...]:
    return (torch.randn(B, 1, S, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


def documents() -> tuple[Tensor, ...]:
    return (torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]),)


# Scales, wherever they sit.


@form("divided")
def _(m: Any) -> Tensor:
    return torch.softmax(m.query @ m.key.transpose(-2, -1) / math.sqrt(D), dim=-1) @ m.value


@form("multiplied")
def _(m: Any) -> Tensor:
    return torch.matmul(torch.matmul(m.query, m.key.transpose(-2, -1)).mul(D**-0.5).softmax(-1), m.value)


@form("no scale")
def _(m: Any) -> Tensor:
    return F.softmax(m.query @ m.key.mT, -1) @ m.value


@form("scale on the query")
def _(m: Any) -> Tensor:
    return F.softmax((m.query * 0.3) @ m.key.transpose(-2, -1), -1) @ m.value


@form("scale on the query before its heads are split", query=(B, S, H * D))
def _(m: Any) -> Tensor:
    query = (m.query / math.sqrt(D)).view(B, S, H, D).transpose(1, 2)
    return F.softmax(query @ m.key.transpose(-2, -1), -1) @ m.value


@form("root of the scale on both")
def _(m: Any) -> Tensor:
    scale = D**-0.25
    return F.softmax((m.query * scale) @ (m.key * scale).transpose(-2, -1), -1) @ m.value


@form("scale on the transposed key")
def _(m: Any) -> Tensor:
    return F.softmax(m.query @ (m.key.permute(0, 1, 3, 2) / 3.0), -1) @ m.value


@form("scale as a tensor")
def _(m: Any) -> Tensor:
    scale = torch.full([], m.value.size(-1) ** 0.5, dtype=m.value.dtype)
    return F.softmax(m.query @ m.key.transpose(-2, -1) / scale, -1) @ m.value


@form("root of a tensor of the size")
def _(m: Any) -> Tensor:
    return F.softmax(m.query @ m.key.transpose(-2, -1) / torch.sqrt(torch.tensor(float(D))), -1) @ m.value


@form("weights scaled before the values")
def _(m: Any) -> Tensor:
    return (F.softmax(m.query @ m.key.mT / 2, -1) * 0.5) @ m.value


@form("learned scale per head", scale=(H, 1, 1))
def _(m: Any) -> Tensor:
    """Swin 2's cosine attention."""
    scores = F.normalize(m.query, dim=-1) @ F.normalize(m.key, dim=-1).transpose(-2, -1)
    return (scores * m.scale.clamp(max=3.0).exp()).softmax(-1) @ m.value


@form("temperature per query", temperature=(S, 1))
def _(m: Any) -> Tensor:
    return (m.query @ m.key.mT / m.temperature.exp()).softmax(-1) @ m.value


# The softmax, in every spelling.


@form("softmax in float32")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.transpose(2, 3) * D**-0.5
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(m.query.dtype) @ m.value


@form("scores cast to float32")
def _(m: Any) -> Tensor:
    scores = torch.matmul(m.query, m.key.transpose(2, 3)).float() / math.sqrt(D)
    return torch.matmul(torch.softmax(scores, -1).type_as(m.value), m.value)


@form("softmax by hand")
def _(m: Any) -> Tensor:
    scores = (m.query @ m.key.mT / math.sqrt(D)).exp()
    return scores / scores.sum(-1, keepdim=True) @ m.value


@form("softmax by hand, shifted by the largest")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT / math.sqrt(D)
    scores = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return (scores / scores.sum(dim=-1, keepdim=True)) @ m.value


@form("softmax by hand, shifted by max and detached")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT / math.sqrt(D)
    weights = torch.exp(scores - scores.max(dim=-1, keepdim=True).values.detach())
    return (weights / weights.sum(-1).unsqueeze(-1)) @ m.value


@form("softmax by hand, shifted by the largest of all")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT / math.sqrt(D)
    weights = torch.exp(scores - scores.max().detach())
    return (weights / weights.sum(-1, keepdim=True)) @ m.value


@form("exp of log-softmax")
def _(m: Any) -> Tensor:
    return F.log_softmax(m.query @ m.key.mT / math.sqrt(D), -1).exp() @ m.value


@form("exp of scores minus logsumexp")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT / math.sqrt(D)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ m.value


@form("nn.Softmax over keys first")
def _(m: Any) -> Tensor:
    """Keys stand in front of queries; the softmax runs over them."""
    scores = m.key @ m.query.transpose(-2, -1) / math.sqrt(D)
    return scores.softmax(dim=-2).transpose(-2, -1) @ m.value


# In place, and by names that torch has beside the usual ones.


@form("negated in place")
def _(m: Any) -> Tensor:
    return ((-m.query) @ m.key.mT).neg_().softmax(-1) @ m.value


@form("multiplied and divided by other names")
def _(m: Any) -> Tensor:
    query = torch.multiply(m.query, 0.5)
    return torch.true_divide(query @ torch.divide(m.key, 2.0).mT, math.sqrt(D)).softmax(-1) @ m.value


@form("queries scaled in place")
def _(m: Any) -> Tensor:
    return (m.query.mul_(0.5) @ m.key.mT).softmax(-1) @ m.value


@form("exponentials over their sum, by other names")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT
    powers = torch.subtract(scores, torch.broadcast_to(scores.amax(-1, keepdim=True), scores.shape)).exp()
    return torch.divide(powers, torch.broadcast_to(powers.sum(-1, keepdim=True), powers.shape)) @ m.value


@form("exp of scores less logsumexp, by another name")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT
    return torch.subtract(scores, scores.logsumexp(-1, keepdim=True)).exp() @ m.value


@form("a bias subtracted by name", bias=(H, S, T))
def _(m: Any) -> Tensor:
    return torch.subtract(m.query @ m.key.mT, m.bias, alpha=0.5).softmax(-1) @ m.value


@form("in the shape of something else")
def _(m: Any) -> Tensor:
    key = m.key.reshape(B * H, T, D)
    return torch.bmm((m.query.reshape(B * H, S, D) @ key.mT).softmax(-1), m.value.view_as(m.key).reshape_as(key)).view_as(m.query)


@form("a dim of one element squeezed")
def _(m: Any) -> Tensor:
    return ((m.query.unsqueeze(2) @ m.key.unsqueeze(2).mT).squeeze((2,)).softmax(-1) @ m.value).contiguous()
