"""Soft caps, sinks and windows, however they are written, and what looks like them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.attention import LOWEST, SQUARE, B, D, H, S, T, added, form, padding, some_empty

GROUPED = {"key": (B, 2, T, D)}


def scores_of(m: Any) -> Tensor:
    return m.query @ m.key.transpose(-2, -1) / math.sqrt(D)


# Soft caps.


@form("soft cap of Gemma 2", inputs=added, **GROUPED)
def _(m: Any, mask: Tensor) -> Tensor:
    key, value = (item[:, :, None].expand(B, 2, 2, T, D).reshape(B, H, T, D) for item in (m.key, m.value))
    weights = torch.matmul(m.query, key.transpose(2, 3)) * D**-0.5
    weights = weights / 2.0
    weights = torch.tanh(weights)
    weights = weights * 2.0
    weights = F.softmax(weights + mask, dim=-1, dtype=torch.float32).to(m.query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


@form("soft cap in place, causal", **SQUARE)
def _(m: Any) -> Tensor:
    scores = (m.query * 0.5) @ m.key.mT
    scores = scores.div_(1.5).tanh_() * 1.5
    return scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf).softmax(-1) @ m.value


@form("soft cap of another height, negated twice")
def _(m: Any) -> Tensor:
    """Grok: the number that divides need not be the one that multiplies."""
    return (-3.0 * torch.tanh(scores_of(m) * -0.25)).softmax(-1) @ m.value


@form("soft cap in one call, padded", query=(B * H, S, D), key=(B * H, D, T), value=(B * H, T, D), inputs=some_empty)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = 2.0 * torch.baddbmm(m.query.new_zeros(1), m.query, m.key, beta=0, alpha=0.2).view(B, H, S, T).tanh()
    scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
    return (scores.softmax(-1).view(B * H, S, T) @ m.value).view(B, H, S, D)


@form("soft cap of scores that a temperature scales", temperature=(H, 1, 1))
def _(m: Any) -> Tensor:
    return (4.0 * (scores_of(m) * m.temperature.exp() / 4.0).tanh() + 1.0).softmax(-1) @ m.value


@form("two soft caps", reason="capped by tanh twice")
def _(m: Any) -> Tensor:
    return (scores_of(m).tanh() * 2.0).tanh().softmax(-1) @ m.value


@form("a mask, then a soft cap", reason="masked, before they are capped", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    """What is masked still has a score of −cap."""
    scores = scores_of(m).masked_fill(~mask[:, None, None], -math.inf)
    return ((scores / 5.0).tanh() * 5.0).softmax(-1) @ m.value


@form("a number, then a soft cap", reason="added to the scores, or they are masked, before they are capped")
def _(m: Any) -> Tensor:
    return ((scores_of(m) + 1.0).tanh() * 5.0).softmax(-1) @ m.value


@form("a learned soft cap", reason="scaled by a tensor after a soft cap", cap=(H, 1, 1))
def _(m: Any) -> Tensor:
    return ((scores_of(m) / m.cap).tanh() * m.cap).softmax(-1) @ m.value


@form("capped by another function", reason="the scores go through atan")
def _(m: Any) -> Tensor:
    return (scores_of(m).atan() * 5.0).softmax(-1) @ m.value


# Sinks.


def sinks_of(m: Any, rows: int = S) -> Tensor:
    return m.sink.reshape(1, -1, 1, 1).expand(B, -1, rows, -1)


@form("sink of gpt-oss", sink=(H,), inputs=added, **GROUPED)
def _(m: Any, mask: Tensor) -> Tensor:
    key, value = (item[:, :, None].expand(B, 2, 2, T, D).reshape(B, H, T, D) for item in (m.key, m.value))
    weights = torch.matmul(m.query, key.transpose(2, 3)) * 0.5
    weights = weights + mask
    combined = torch.cat([weights, sinks_of(m)], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    probabilities = F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    weights = F.dropout(probabilities, p=0.0, training=m.training).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


@form("sink by einsum, no batch", query=(S, 2, 3, D), key=(T, 2, D), sink=(6,))
def _(m: Any) -> Tensor:
    """OpenAI's own."""
    key, value = (item[:, :, None, :].expand(-1, -1, 3, -1) for item in (m.key, m.value))
    scores = torch.einsum("qhmd,khmd->hmqk", m.query, key) * 0.4
    scores += torch.triu(m.query.new_full((S, T), -float("inf")), diagonal=1)[None, None]
    scores = torch.cat([scores, m.sink.reshape(2, 3, 1, 1).expand(-1, -1, S, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :-1]
    return torch.einsum("hmqk,khmd->qhmd", weights, value).reshape(S, -1)


@form("sink in front, rows without any key", sink=(H, 1, 1), inputs=some_empty)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = scores_of(m).masked_fill(~mask[:, None, None], -math.inf)
    weights = torch.cat([m.sink.expand(B, H, S, 1), scores], -1).softmax(-1)
    return weights[..., 1:] @ m.value


@form("sink split off, the least number, rows without any key", sink=(H, 1, 1), inputs=some_empty)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = scores_of(m).masked_fill(~mask[:, None, None], LOWEST)
    weights = torch.cat((scores, m.sink.expand(B, H, S, 1)), -1).float().softmax(-1)
    return weights.split([T, 1], dim=-1)[0].to(m.value.dtype) @ m.value


@form("sink by query, by hand", sink=(D, 1))
def _(m: Any) -> Tensor:
    scores = torch.cat([scores_of(m), m.query @ m.sink], -1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)).narrow(-1, 0, T) @ m.value


@form("sink of zero, soft cap and a window", **SQUARE)
def _(m: Any) -> Tensor:
    """Softmax plus one, kept from overflowing."""
    distance = torch.arange(S)[:, None] - torch.arange(S)
    scores = ((scores_of(m) / 3.0).tanh() * 3.0).masked_fill((distance < 0) | (distance > 2), -math.inf)
    scores = F.softmax(torch.cat([scores, m.query.new_zeros(B, H, S, 1)], -1), -1)
    return scores[:, :, :, :S] @ m.value


@form("shifted by the largest, outside of the softmax")
def _(m: Any) -> Tensor:
    scores = scores_of(m)
    return (scores - scores.max(-1, keepdim=True).values).softmax(-1) @ m.value


@form("two sinks", reason="2 columns of the softmax are dropped", sink=(H, 1, 2))
def _(m: Any) -> Tensor:
    return torch.cat([scores_of(m), m.sink.expand(B, H, S, 2)], -1).softmax(-1)[..., :-2] @ m.value


@form("the first key dropped and the sink kept", reason="are not those beside the scores", sink=(H, 1, 1), value=(B, H, T, D))
def _(m: Any) -> Tensor:
    return torch.cat([scores_of(m), m.sink.expand(B, H, S, 1)], -1).softmax(-1)[..., 1:] @ m.value


@form("every other column kept", reason="the probabilities go through slice", value=(B, H, 4, D))
def _(m: Any) -> Tensor:
    return scores_of(m).softmax(-1)[..., ::2] @ m.value


@form("dropout before the sink is dropped", reason="the probabilities go through slice", sink=(H, 1, 1))
def _(m: Any) -> Tensor:
    """Its draws are of one column more."""
    weights = torch.cat([scores_of(m), m.sink.expand(B, H, S, 1)], -1).softmax(-1)
    return F.dropout(weights, 0.25, training=True)[..., :-1] @ m.value


@form("the sink's own probability is read", reason="are used elsewhere too", sink=(H, 1, 1))
def _(m: Any) -> Tensor:
    weights = torch.cat([scores_of(m), m.sink.expand(B, H, S, 1)], -1).softmax(-1)
    return weights[..., :-1] @ m.value + weights[..., -1:]


@form("a sink with a value", reason="the scores go through cat", sink=(H, 1, 1), nothing=(1, 1, 1, D))
def _(m: Any) -> Tensor:
    value = torch.cat([m.value, m.nothing.expand(B, H, 1, D)], -2)
    return torch.cat([scores_of(m), m.sink.expand(B, H, S, 1)], -1).softmax(-1) @ value


@form("a number added beside a sink", reason="a number is added to the scores beside a sink", sink=(H, 1, 1))
def _(m: Any) -> Tensor:
    return torch.cat([scores_of(m) + 1.0, m.sink.expand(B, H, S, 1)], -1).softmax(-1)[..., :-1] @ m.value


@form("the largest score taken off beside a sink", reason="the mask depends on the scores", sink=(H, 1, 1))
def _(m: Any) -> Tensor:
    scores = scores_of(m)
    scores = scores - scores.amax(-1, keepdim=True)
    return torch.cat([scores, m.sink.expand(B, H, S, 1)], -1).softmax(-1)[..., :-1] @ m.value


# Windows: `test_fuse_attention.py` says of each whether it is a flag.


@form("window on both sides", **SQUARE)
def _(m: Any) -> Tensor:
    distance = (torch.arange(S)[:, None] - torch.arange(S)).abs()
    return torch.where(distance <= 2, scores_of(m), -math.inf).softmax(-1) @ m.value


@form("window, added", **SQUARE)
def _(m: Any) -> Tensor:
    """transformers' eager masks: the least number, added."""
    inside = torch.ones(S, S, dtype=torch.bool).tril().triu(-1)
    mask = torch.where(inside, 0.0, LOWEST)[None, None].to(m.query.dtype)
    return (scores_of(m) + mask).softmax(-1) @ m.value


@form("causal, then half of a band", **SQUARE)
def _(m: Any) -> Tensor:
    scores = scores_of(m).masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    return scores.masked_fill(torch.ones(S, S).tril(-4).bool(), -math.inf).softmax(-1) @ m.value


@form("half of a band, then causal", **SQUARE)
def _(m: Any) -> Tensor:
    scores = scores_of(m) + torch.full((S, S), -math.inf, dtype=m.query.dtype).tril(-3)
    return (scores + torch.full((S, S), -math.inf, dtype=m.query.dtype).triu(1)).softmax(-1) @ m.value


@form("half of a band", **SQUARE)
def _(m: Any) -> Tensor:
    return scores_of(m).masked_fill(torch.ones(S, S).tril(-3).bool(), -math.inf).softmax(-1) @ m.value


@form("a band that is not where the rows are")
def _(m: Any) -> Tensor:
    """The rows are the last of the keys' positions."""
    inside = torch.ones(S, T, dtype=torch.bool).tril(T - S).triu(T - S - 3)
    return scores_of(m).masked_fill(~inside, -math.inf).softmax(-1) @ m.value


@form("window of a buffer", **SQUARE)
def _(m: Any) -> Tensor:
    inside = m.triangle[:S, :S].triu(-2) != 0
    return scores_of(m).masked_fill(~inside, -math.inf).softmax(-1) @ m.value


@form("window that some heads have", **SQUARE)
def _(m: Any) -> Tensor:
    distance = torch.arange(S)[:, None] - torch.arange(S)
    inside = (distance >= 0) & (distance < torch.tensor([3, 3, S, S])[:, None, None])
    return scores_of(m).masked_fill(~inside, -math.inf).softmax(-1) @ m.value


@form("window, rows without any key", query=(B, H, 9, D), key=(B, H, 5, D))
def _(m: Any) -> Tensor:
    inside = torch.ones(9, 5, dtype=torch.bool).tril().triu(-1)
    return scores_of(m).masked_fill(~inside, -math.inf).softmax(-1).nan_to_num(0.0) @ m.value


@form("masks of a known number and of -inf", reason="masks of −inf and of a number meet", inputs=padding, **SQUARE)
def _(m: Any, mask: Tensor) -> Tensor:
    """Where −inf takes all keys up to a row, the number has the weight that is left."""
    scores = scores_of(m).masked_fill(torch.ones(S, S).triu(1).bool(), -1e9)
    return scores.masked_fill(~mask[:, None, None, :S], -math.inf).softmax(-1) @ m.value
