"""More ways to write attention: by how its operands lie, and with fewer heads of keys than of queries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.attention import B, D, H, S, T, added, form

# Layouts.


@form("three dims", query=(B * H, S, D), key=(B * H, T, D))
def _(m: Any) -> Tensor:
    return torch.bmm(F.softmax(torch.bmm(m.query, m.key.transpose(1, 2)) / 2, dim=-1), m.value)


@form("three dims from four, with a mask", inputs=added, query=(B, S, H * D))
def _(m: Any, mask: Tensor) -> Tensor:
    """BART and OPT as they were."""
    query = (m.query * D**-0.5).view(B, S, H, D).transpose(1, 2).reshape(B * H, S, D)
    scores = torch.bmm(query, m.key.reshape(B * H, T, D).transpose(1, 2))
    scores = (scores.view(B, H, S, T) + mask).view(B * H, S, T)
    out = torch.bmm(F.softmax(scores, dim=-1), m.value.reshape(B * H, T, D))
    return out.view(B, H, S, D).transpose(1, 2).reshape(B, S, H * D)


@form("baddbmm without its first operand", query=(B * H, S, D), key=(B * H, T, D))
def _(m: Any) -> Tensor:
    empty = torch.empty(B * H, S, T, dtype=m.query.dtype)
    scores = torch.baddbmm(empty, m.query, m.key.transpose(1, 2), beta=0.0, alpha=0.5)
    return scores.softmax(-1) @ m.value


@form("two dims", query=(S, D), key=(T, D))
def _(m: Any) -> Tensor:
    return torch.mm(F.softmax(torch.mm(m.query, m.key.t()) / 2, 1), m.value)


@form("five dims", query=(2, 3, H, S, D), key=(2, 3, H, T, D))
def _(m: Any) -> Tensor:
    return F.softmax(m.query @ m.key.transpose(-1, -2) / 2, -1) @ m.value


@form("einsum")
def _(m: Any) -> Tensor:
    weights = torch.einsum("bhsd,bhtd->bhst", m.query, m.key).div(2).softmax(-1)
    return torch.einsum("bhst,bhtd->bhsd", weights, m.value)


@form("einsum, heads inside", query=(B, S, H, D), key=(B, T, H, D))
def _(m: Any) -> Tensor:
    weights = torch.einsum("bqhd,bkhd->bhqk", m.query, m.key).mul(D**-0.5).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, m.value)


@form("einsum with keys first, and dots")
def _(m: Any) -> Tensor:
    weights = torch.einsum("...td,...sd->...ts", m.key, m.query * 0.5).softmax(-2)
    return torch.einsum("...td,...ts->...sd", m.value, weights)


@form("values in front", query=(B, D, S), key=(B, D, T))
def _(m: Any) -> Tensor:
    """Attention over pixels, channels first, of diffusion models."""
    scores = torch.bmm(m.query.permute(0, 2, 1), m.key) * D**-0.5
    return torch.bmm(m.value, scores.softmax(2).permute(0, 2, 1))


@form("fused projection", query=(B, S, 3 * H * D), key=(1,))
def _(m: Any) -> Tensor:
    query, key, value = m.query.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    out = ((query * D**-0.5) @ key.transpose(-2, -1)).softmax(-1) @ value
    return out.transpose(1, 2).reshape(B, S, H * D) + (m.key + m.value)[0]


@form("values wider than keys", value=(B, H, T, 2 * D))
def _(m: Any) -> Tensor:
    return F.softmax(m.query @ m.key.mT / 2, -1) @ m.value


@form("learned queries for all samples", query=(H, S, D))
def _(m: Any) -> Tensor:
    """Perceiver."""
    return F.softmax(m.query.unsqueeze(0).expand(B, -1, -1, -1) @ m.key.mT / 2, -1) @ m.value


@form("one query", query=(B, H, 1, D))
def _(m: Any) -> Tensor:
    return F.softmax(m.query @ m.key.mT / 2, -1) @ m.value


# Grouped heads.


def repeated(value: Tensor, times: int) -> Tensor:
    batch, groups, length, width = value.shape
    return value[:, :, None].expand(batch, groups, times, length, width).reshape(batch, groups * times, length, width)


@form("repeated key heads", key=(B, 2, T, D))
def _(m: Any) -> Tensor:
    """Llama."""
    return F.softmax(m.query @ repeated(m.key, 2).transpose(2, 3) / 2, -1) @ repeated(m.value, 2)


@form("repeat_interleave", key=(B, 2, T, D))
def _(m: Any) -> Tensor:
    key, value = (item.repeat_interleave(2, dim=1) for item in (m.key, m.value))
    return F.softmax(m.query @ key.mT / 2, -1) @ value


@form("repeat, heads in turn", key=(B, 2, T, D))
def _(m: Any) -> Tensor:
    """`repeat` copies the block: query head h reads key head h % 2."""
    key, value = (item.repeat(1, 2, 1, 1) for item in (m.key, m.value))
    return F.softmax(m.query @ key.mT / 2, -1) @ value


@form("one key head, by broadcasting", key=(B, 1, T, D))
def _(m: Any) -> Tensor:
    """Falcon."""
    return F.softmax(m.query @ m.key.mT / 2, -1) @ m.value


@form("one key head, queries in one dim", key=(B, T, D), inputs=added)
def _(m: Any, mask: Tensor) -> Tensor:
    """StarCoder: heads and positions of the queries in one dim."""
    scores = torch.bmm(m.query.reshape(B, H * S, D), m.key.transpose(1, 2)).view(B, H, S, T)
    weights = (scores * D**-0.5 + mask).softmax(-1)
    return torch.bmm(weights.view(B, H * S, T), m.value).view(B, H, S, D)


@form("groups in an einsum", query=(B, 2, 2, S, D), key=(B, 2, T, D))
def _(m: Any) -> Tensor:
    weights = torch.einsum("bgrsd,bgtd->bgrst", m.query, m.key).mul(0.5).softmax(-1)
    return torch.einsum("bgrst,bgtd->bgrsd", weights, m.value)
