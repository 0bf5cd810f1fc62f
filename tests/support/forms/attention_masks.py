"""More ways to write attention: by what may attend to what, and by what is added to the scores."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.attention import LOWEST, SQUARE, B, D, H, S, T, added, documents, form, padding, some_empty, square_padding

# Masks.


@form("causal by masked_fill", **SQUARE)
def _(m: Any) -> Tensor:
    mask = torch.tril(torch.ones(S, S)).bool()
    return (m.query @ m.key.mT / 2).masked_fill(~mask, -math.inf).softmax(-1) @ m.value


@form("causal by triu and in place", **SQUARE)
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT / 2
    scores.masked_fill_(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ m.value


@form("causal by where, the least number", **SQUARE)
def _(m: Any) -> Tensor:
    """GPT-2 as it was."""
    scores = m.query @ m.key.mT / 2
    mask = torch.arange(S)[:, None] >= torch.arange(S)[None]
    return torch.where(mask, scores, torch.full([], LOWEST, dtype=scores.dtype)).softmax(-1) @ m.value


@form("causal, added", **SQUARE)
def _(m: Any) -> Tensor:
    mask = torch.full((S, S), -math.inf, dtype=m.query.dtype).triu(1)
    return (m.query @ m.key.mT / 2 + mask).softmax(-1) @ m.value


@form("causal by a buffer", **SQUARE)
def _(m: Any) -> Tensor:
    """nanoGPT: the buffer is state, so the mask stays an operand."""
    scores = m.query @ m.key.mT / 2
    return scores.masked_fill(m.triangle[:S, :S] == 0, float("-inf")).softmax(-1) @ m.value


@form("causal, keys longer than queries")
def _(m: Any) -> Tensor:
    mask = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    return (m.query @ m.key.mT / 2).masked_fill(mask.logical_not(), -math.inf).softmax(-1) @ m.value


@form("window", **SQUARE)
def _(m: Any) -> Tensor:
    """Mistral."""
    distance = torch.arange(S)[:, None] - torch.arange(S)
    outside = (distance < 0) | (distance >= 3)
    return (m.query @ m.key.mT / 2).masked_fill(outside, -math.inf).softmax(-1) @ m.value


@form("padding, -inf", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    return (m.query @ m.key.mT / 2).masked_fill(~mask[:, None, None, :], -math.inf).softmax(-1) @ m.value


@form("padding, the least number, rows without any key", inputs=some_empty)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = m.query @ m.key.mT / 2
    return scores.masked_fill(mask[:, None, None, :] == 0, torch.finfo(scores.dtype).min).softmax(-1) @ m.value


@form("padding, -1e9 and a bias, rows without any key", inputs=some_empty, bias=(H, S, T))
def _(m: Any, mask: Tensor) -> Tensor:
    scores = m.query @ m.key.mT / 2 + m.bias
    return scores.masked_fill(~mask[:, None, None, :], -1e9).softmax(-1) @ m.value


@form("padding, -1e9, and biases of layers", inputs=some_empty, bias=(H, S, T), place=(H, D, T), table=(5, H))
def _(m: Any, mask: Tensor) -> Tensor:
    """DeBERTa's and Swin's kinds: of positions with the query, and looked up by distance, beside a known one that masks nothing."""
    distance = (torch.arange(S)[:, None] - torch.arange(T)).clamp(-2, 2) + 2
    bias = m.table[distance].permute(2, 0, 1) + m.bias.type_as(m.query) + (torch.arange(T) / 7).to(m.query.dtype)
    scores = m.query @ m.key.mT / 2 + m.query @ m.place + bias
    return scores.masked_fill(~mask[:, None, None, :], -1e9).softmax(-1) @ m.value


@form("padding, then zeros", inputs=some_empty)
def _(m: Any, mask: Tensor) -> Tensor:
    """XLM and its kin: rows without any key are zero."""
    masked = ~mask[:, None, None, :]
    scores = (m.query @ m.key.mT / 2).masked_fill(masked, LOWEST)
    return scores.softmax(-1).masked_fill(masked, 0.0) @ m.value


@form("padding, then nan_to_num", inputs=some_empty)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = (m.query @ m.key.mT / 2).masked_fill(~mask[:, None, None, :], -math.inf)
    return torch.nan_to_num(scores.softmax(-1), nan=0.0) @ m.value


@form("padding, added", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    """BERT."""
    extended = (1.0 - mask[:, None, None, :].to(m.query.dtype)) * -10000.0
    return (m.query @ m.key.mT / math.sqrt(D) + extended).softmax(-1) @ m.value


@form("padding and causal", inputs=square_padding, **SQUARE)
def _(m: Any, mask: Tensor) -> Tensor:
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    allowed = causal & mask[:, None, None, :]
    return torch.where(allowed, m.query @ m.key.mT / 2, -math.inf).softmax(-1) @ m.value


@form("padding, then causal", inputs=square_padding, **SQUARE)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = (m.query @ m.key.mT / 2).masked_fill(~mask[:, None, None], -math.inf)
    return scores.masked_fill(torch.triu(torch.ones(S, S), 1).bool(), -math.inf).softmax(-1) @ m.value


@form("documents", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    same = ids[:, None, :, None] == ids[:, None, None, :]
    allowed = same & torch.ones(S, S, dtype=torch.bool).tril()
    return (m.query @ m.key.mT / 2).masked_fill(~allowed, -math.inf).softmax(-1) @ m.value


@form("added mask", inputs=added)
def _(m: Any, mask: Tensor) -> Tensor:
    return (m.query @ m.key.mT / 2 + mask).softmax(-1) @ m.value


@form("added, then scaled", inputs=added)
def _(m: Any, mask: Tensor) -> Tensor:
    """Falcon's ALiBi: the scale multiplies the mask, too."""
    return ((m.query @ m.key.mT + mask) * 0.25).softmax(-1) @ m.value


@form("subtracted mask", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    return (m.query @ m.key.mT / 2 - 1e4 * (~mask[:, None, None]).to(m.query.dtype)).softmax(-1) @ m.value


@form("learned bias", bias=(1, H, S, T))
def _(m: Any) -> Tensor:
    """T5: no scale, a bias with a gradient."""
    return (m.query @ m.key.transpose(3, 2) + m.bias).softmax(-1) @ m.value


@form("learned bias from a table", table=(11, H))
def _(m: Any) -> Tensor:
    """Swin, BEiT: the bias is looked up by distance."""
    distance = (torch.arange(S)[:, None] - torch.arange(T)).clamp(-5, 5) + 5
    bias = m.table[distance].permute(2, 0, 1).unsqueeze(0)
    return (m.query * D**-0.5 @ m.key.mT + bias).softmax(-1) @ m.value


@form("shifted windows", query=(3 * B, H, S, D), key=(3 * B, H, S, D), bias=(H, S, S), inputs=lambda: (torch.randn(3, S, S).double(),))
def _(m: Any, mask: Tensor) -> Tensor:
    """Swin: a mask for each window of a sample."""
    scores = m.query * 0.5 @ m.key.transpose(-2, -1) + m.bias.unsqueeze(0)
    scores = scores.view(B, 3, H, S, S) + mask.unsqueeze(1).unsqueeze(0)
    return scores.view(-1, H, S, S).softmax(-1) @ m.value


@form("bias of rows and of columns", query=(B, H, 6, D), key=(B, H, 6, D), rows=(B, H, 6, 2), columns=(B, H, 6, 3))
def _(m: Any) -> Tensor:
    """Segment Anything: positions of an image of 2 × 3."""
    scores = (m.query @ m.key.mT / 2).view(B, H, 2, 3, 2, 3)
    scores = scores + m.rows.view(B, H, 2, 3, 2, 1) + m.columns.view(B, H, 2, 3, 1, 3)
    return scores.view(B, H, 6, 6).softmax(-1) @ m.value


@form("bias from the query", place=(2 * S, D), **SQUARE)
def _(m: Any) -> Tensor:
    """DeBERTa, Transformer-XL: relative positions against the query, gathered, added to the scores."""
    distance = torch.arange(S)[:, None] - torch.arange(S) + S
    relative = (m.query @ m.place.mT).gather(-1, distance.expand(B, H, S, S))
    return ((m.query @ m.key.mT + relative) / math.sqrt(3 * D)).softmax(-1) @ m.value


@form("ALiBi in one call", query=(B * H, S, D), key=(B * H, D, T), value=(B * H, T, D))
def _(m: Any) -> Tensor:
    """BLOOM."""
    slopes = 2.0 ** -torch.arange(1, H + 1, dtype=m.query.dtype)
    bias = (slopes[:, None, None] * torch.arange(T)).repeat(B, 1, 1)
    scores = bias.baddbmm(batch1=m.query, batch2=m.key, beta=1.0, alpha=D**-0.5)
    weights = F.softmax(scores.view(B, H, S, T), dim=-1).view(B * H, S, T)
    return torch.bmm(weights, m.value)


@form("ALiBi, causal", **SQUARE)
def _(m: Any) -> Tensor:
    """MPT."""
    slopes = 2.0 ** -torch.arange(1, H + 1, dtype=m.query.dtype)
    scores = m.query @ m.key.mT / math.sqrt(D) + slopes[:, None, None] * torch.arange(1 - S, 1)
    return scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf).softmax(-1) @ m.value
