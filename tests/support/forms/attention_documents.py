"""Ways to write attention over packed documents: ids compared, in every spelling; and comparisons that stay masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.support.forms.attention import LOWEST, SQUARE, B, D, H, S, documents, form

# By name: what the op says, (documents, causal, window, whether a mask is left).
MEANING: dict[str, tuple[bool, bool, int, bool]] = {"documents": (True, True, 0, False)}


def scores_of(m: Any) -> Tensor:
    return m.query @ m.key.mT / 2


def same(ids: Tensor) -> Tensor:
    return ids[:, None, :, None] == ids[:, None, None, :]


def triangle() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def positions() -> tuple[Tensor, ...]:
    return (torch.tensor([[0, 1, 2, 0, 1, 2], [3, 4, 0, 1, 2, 0]]),)


def of_both() -> tuple[Tensor, ...]:
    """Of six queries and of seven keys, one of which at least each query has."""
    return torch.tensor([[0, 0, 1, 1, 4, 4], [7, 7, 7, 7, 7, 2]]), torch.tensor([[0, 1, 1, 4, 4, 4, 5], [2, 7, 7, 3, 3, 2, 2]])


def by_head() -> tuple[Tensor, ...]:
    return (torch.arange(H * S).view(H, S) // 4,)


MEANING["documents without heads, then a dim for them"] = (True, False, 0, False)


@form("documents without heads, then a dim for them", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    mask = ids[:, :, None] == ids[:, None, :]
    return scores_of(m).masked_fill(~mask.unsqueeze(1), -math.inf).softmax(-1) @ m.value


MEANING["documents by eq, where"] = (True, False, 0, False)


@form("documents by eq, where", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    mask = torch.eq(ids.view(B, 1, S, 1), ids.view(B, 1, 1, S)).expand(B, H, S, S)
    return torch.where(mask, scores_of(m), -math.inf).softmax(-1) @ m.value


MEANING["other documents or later keys are masked"] = (True, True, 0, False)


@form("other documents or later keys are masked", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    others = ids[:, None, :, None] != ids[:, None, None, :]
    return scores_of(m).masked_fill(others | torch.ones(S, S).triu(1).bool(), -math.inf).softmax(-1) @ m.value


MEANING["documents, the least number"] = (True, True, 0, False)


@form("documents, the least number", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    """Each position attends to itself at least, so no row shows the number."""
    return scores_of(m).masked_fill(~(same(ids) & triangle()), LOWEST).softmax(-1) @ m.value


MEANING["documents, -inf added"] = (True, True, 0, False)


@form("documents, -inf added", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    mask = torch.zeros(B, 1, S, S).to(m.query.dtype).masked_fill((same(ids) & triangle()).logical_not(), -math.inf)
    return (scores_of(m) + mask).softmax(-1) @ m.value


MEANING["documents, the least number added by where"] = (True, False, 0, False)


@form("documents, the least number added by where", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    return (scores_of(m) + torch.where(same(ids), 0.0, LOWEST).to(m.query.dtype)).softmax(-1) @ m.value


MEANING["documents, one less, times a number"] = (True, False, 0, False)


@form("documents, one less, times a number", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    return (scores_of(m) + (1.0 - same(ids).to(m.query.dtype)) * -1e30).softmax(-1) @ m.value


MEANING["documents and a window"] = (True, True, 3, False)


@form("documents and a window", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    distance = torch.arange(S)[:, None] - torch.arange(S)
    mask = torch.logical_and(same(ids), (distance >= 0) & (distance < 3))
    return scores_of(m).masked_fill(~mask, -math.inf).softmax(-1) @ m.value


MEANING["documents and padding"] = (True, True, 0, True)


@form("documents and padding", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    """The last document is what fills the sequence up; nothing attends to it but what is in it, which gets zeros."""
    mask = same(ids) & triangle() & (ids != 2)[:, None, None, :]
    return torch.nan_to_num(scores_of(m).masked_fill(~mask, -math.inf).softmax(-1), nan=0.0) @ m.value


MEANING["documents of queries and of keys"] = (True, False, 0, False)


@form("documents of queries and of keys", inputs=of_both)
def _(m: Any, of_query: Tensor, of_key: Tensor) -> Tensor:
    mask = of_key[:, None, None] == of_query[:, None, :, None]
    return scores_of(m).masked_fill(~mask, -math.inf).softmax(-1) @ m.value


MEANING["documents for all samples"] = (True, True, 0, False)


@form("documents for all samples", inputs=lambda: (documents()[0][0],), **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    return scores_of(m).masked_fill(~((ids[:, None] == ids) & triangle()), -math.inf).softmax(-1) @ m.value


MEANING["documents, heads merged into the batch"] = (True, False, 0, False)


@form("documents, heads merged into the batch", inputs=documents, query=(B * H, S, D), key=(B * H, S, D))
def _(m: Any, ids: Tensor) -> Tensor:
    scores = torch.bmm(m.query, m.key.mT).view(B, H, S, S).masked_fill(~same(ids), -math.inf)
    return torch.bmm(scores.softmax(-1).view(B * H, S, S), m.value)


MEANING["documents and positions, gathered"] = (True, True, 0, False)


def packed(m: Any, position: Tensor) -> Tensor:
    """transformers: documents begin where positions do not rise by one."""
    ids = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, rows, keys = torch.arange(B)[:, None, None, None], torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None]
    mask = (ids[batch, rows] == ids[batch, keys]) & (position[batch, keys] <= position[batch, rows])
    return scores_of(m).masked_fill(~mask, -math.inf).softmax(-1) @ m.value


@form("documents and positions, gathered", inputs=positions, **SQUARE)
def _(m: Any, position: Tensor) -> Tensor:
    return packed(m, position)


MEANING["positions that nobody gave"] = (False, True, 0, False)


@form("positions that nobody gave", **SQUARE)
def _(m: Any) -> Tensor:
    """They restart nowhere: one document, and so none."""
    return packed(m, torch.arange(S).expand(B, S))


MEANING["documents, and positions that may fall"] = (True, False, 0, True)


@form("documents, and positions that may fall", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    """What counts the documents does not count where these positions restart."""
    position = (ids * 5) % 3
    earlier = position[:, None, None, :] <= position[:, None, :, None]
    return scores_of(m).masked_fill(~(same(ids) & earlier), -math.inf).softmax(-1) @ m.value


# What only looks like documents.

MEANING["documents of floats"] = (False, False, 0, True)


@form("documents of floats", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    return scores_of(m).masked_fill(~same(ids.to(m.query.dtype)), -math.inf).softmax(-1) @ m.value


MEANING["other documents alone"] = (False, False, 0, True)


@form("other documents alone", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    return scores_of(m).masked_fill(same(ids), -math.inf).softmax(-1) @ m.value


MEANING["documents or earlier keys"] = (False, False, 0, True)


@form("documents or earlier keys", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    return scores_of(m).masked_fill(~(same(ids) | triangle()), -math.inf).softmax(-1) @ m.value


MEANING["documents of no less"] = (False, False, 0, True)


@form("documents of no less", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    return scores_of(m).masked_fill(~(ids[:, None, :, None] >= ids[:, None, None, :]), -math.inf).softmax(-1) @ m.value


MEANING["documents by head"] = (False, False, 0, True)


@form("documents by head", inputs=by_head, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    return scores_of(m).masked_fill(~(ids[:, :, None] == ids[:, None, :]), -math.inf).softmax(-1) @ m.value


MEANING["documents of queries that no key has, a number"] = (False, False, 0, True)


@form("documents of queries that no key has, a number", inputs=lambda: (of_both()[0] + 1, of_both()[1]))
def _(m: Any, of_query: Tensor, of_key: Tensor) -> Tensor:
    """Such a row weighs all keys alike, which the op says with a mask."""
    return scores_of(m).masked_fill(of_query[:, None, :, None] != of_key[:, None, None, :], LOWEST).softmax(-1) @ m.value


MEANING["ids beside those of their document"] = (False, False, 0, True)


@form("ids beside those of their document", inputs=documents, **SQUARE)
def _(m: Any, ids: Tensor) -> Tensor:
    """Keys are numbered from the other end: a row need not attend to itself, and a number shows."""
    return scores_of(m).masked_fill(~(ids[:, None, :, None] == ids.flip(-1)[:, None, None, :]), LOWEST).softmax(-1) @ m.value
