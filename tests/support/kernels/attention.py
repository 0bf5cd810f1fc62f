"""Operands and options of attention in tests; what the dropout of scores is drawn from, and the mask that it makes, in plain ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.attention_masks import Draws
from autopar.kernels.dropout import drawn

PLAIN: dict[str, Any] = {"is_causal": False, "scale": 0.3, "soft_cap": 0.0, "window": 0}
PLAIN |= {"keep_below": 0, "keep_scale": 1.0, "implementation": "triton"}
# A scale that is not 1 / p: it is the op's to multiply by, whatever it is.
DROPS: dict[str, Any] = {"keep_below": round(0.7 * 2**32), "keep_scale": 1 / 0.75}
NO_DRAWS = (None, None, None)
# For what looks at shapes only: of scores [2, 4, 6, 10].
DRAWS = [torch.empty(shape, dtype=torch.int64) for shape in ((2, 4, 6, 1), (), (10,))]
# Neither mask, nor documents, nor draws.
NOTHING = (None,) * 6

# By name: which dims of the rows, and of the second word, are broadcast.
KINDS = {
    "one word": ((), (0, 1, 2, 3)),
    "rows for all samples": ((0,), (0, 1, 2, 3)),
    "rows for all heads, a word a sample": ((1,), (1, 2, 3)),
    "a word a row": ((), (3,)),
}


def heads_of(batch: int, heads: int, length: int, size: int, dtype: torch.dtype) -> Tensor:
    """As a model has them: split off the last dim, then transposed."""
    return torch.randn(batch, length, heads, size).to(dtype).transpose(1, 2)


def draws_of(scores: Sequence[int], kind: str = "one word", start: int = 2**32 - 12_345) -> Draws:
    """(rows, second, columns) of scores [B, H, S, T]; positions cross 2³²."""
    batch, heads, length, key_length = scores
    rows = start + torch.arange(batch * heads * length).reshape(batch, heads, length, 1) * key_length
    second = torch.randint(0, 2**32, (batch, heads, length, 1))
    for dim in KINDS[kind][0]:
        rows = rows.narrow(dim, 0, 1)
    for dim in KINDS[kind][1]:
        second = second.narrow(dim, 0, 1)
    return rows, second.reshape(()) if kind == "one word" else second, torch.arange(key_length)


def kept_of(scores: Sequence[int], draws: Draws, keep_below: int, keep_scale: float) -> Tensor:
    """What the probabilities of `scores` are multiplied by, float64, number by number."""
    rows, second = (each.expand(*scores[:3], 1).reshape(-1, 1) for each in draws[:2])
    found = drawn(rows, second, draws[2]) < keep_below
    assert found.numel() == math.prod(scores)
    return found.reshape(*scores).double() * keep_scale
