"""The attention kernels against float64: every option of the op, grouped heads, unequal lengths, head sizes of every tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.attention import attention
from autopar.kernels.dropout import drawn
from benchmarks.gpu_accuracy import compared
from benchmarks.gpu_case import Case, Place, Row

HALF, EVERY = (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16, torch.float32)
TINY_LENGTH, TINY_SIZE = 19, 16
# What dropout keeps, and a word and a first position of the draws.
KEPT, WORD, START = 0.7, 0x9E3779B9, 2**32 - 12_345


@dataclass(frozen=True)
class Form:
    """B, H, G, S, T, D, E; what is masked, and how; whether log_sum_exp gets a gradient, too; whose kernel runs it."""

    shape: tuple[int, ...]
    mask: str = ""
    is_causal: bool = False
    window: int = 0
    soft_cap: float = 0.0
    drops: bool = False
    both: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    documents: str = ""
    implementation: str = "triton"

    def options(self) -> dict[str, Any]:
        scale = self.shape[5] ** -0.5
        keep_below, keep_scale = (round(KEPT * 2**32), 1 / KEPT) if self.drops else (0, 1.0)
        options = {"is_causal": self.is_causal, "scale": scale, "soft_cap": self.soft_cap, "window": self.window}
        return options | {"keep_below": keep_below, "keep_scale": keep_scale, "implementation": self.implementation}


PLAIN, WIDE = (2, 4, 4, 777, 777, 64, 64), (2, 4, 2, 777, 777, 128, 128)
FORMS = {
    "full": Form(PLAIN, dtypes=EVERY),
    "causal": Form(PLAIN, is_causal=True, dtypes=EVERY),
    "causal, heads of 128, grouped": Form(WIDE, is_causal=True, dtypes=HALF),
    "full, heads of 128": Form((2, 4, 4, 1024, 1024, 128, 128)),
    "causal, 4096": Form((1, 2, 1, 4096, 4096, 128, 128), is_causal=True),
    "heads of 256": Form((1, 4, 2, 520, 520, 256, 256), is_causal=True),
    "heads of 16": Form((2, 4, 4, 300, 300, 16, 16)),
    "heads of 80": Form((2, 4, 2, 300, 300, 80, 80), is_causal=True),
    "values of another size": Form((2, 4, 4, 300, 300, 96, 64), is_causal=True),
    "causal, more queries": Form((1, 4, 2, 1000, 600, 64, 64), is_causal=True),
    "causal, more keys": Form((1, 4, 2, 600, 1000, 64, 64), is_causal=True),
    "one query": Form((2, 8, 2, 1, 2000, 128, 128)),
    "bool mask": Form(WIDE, mask="bool"),
    "rows that attend to nothing": Form(PLAIN, mask="empty rows", both=True),
    "mask of keys": Form(WIDE, mask="keys", dtypes=HALF),
    "bias, with its gradient": Form(PLAIN, mask="added", dtypes=EVERY),
    "bias, causal": Form(WIDE, mask="added", is_causal=True),
    "dropout": Form(PLAIN, is_causal=True, drops=True, dtypes=EVERY),
    "dropout, heads of 128": Form(WIDE, is_causal=True, drops=True, dtypes=HALF),
    "dropout, heads of 256": Form((1, 4, 2, 520, 520, 256, 256), is_causal=True, drops=True),
    "dropout and bool mask": Form(WIDE, mask="bool", drops=True),
    "dropout and bias": Form(PLAIN, mask="added", drops=True),
    "dropout and documents": Form(WIDE, is_causal=True, documents="in order", drops=True),
    "window": Form(WIDE, is_causal=True, window=100),
    "window, heads of 64": Form(PLAIN, is_causal=True, window=100, dtypes=EVERY),
    "window on both sides": Form(WIDE, window=100),
    "soft cap": Form(WIDE, is_causal=True, soft_cap=2.0),
    "soft cap, heads of 256": Form((1, 4, 2, 520, 520, 256, 256), is_causal=True, soft_cap=2.0),
    "soft cap and window": Form(PLAIN, is_causal=True, window=100, soft_cap=2.0),
    "soft cap and bias": Form(PLAIN, mask="added", soft_cap=2.0),
    "documents": Form(WIDE, is_causal=True, documents="in order", dtypes=HALF),
    "documents, heads of 64": Form(PLAIN, documents="in order", dtypes=EVERY),
    "documents in any order": Form(WIDE, documents="mixed"),
    "documents and a window": Form(PLAIN, is_causal=True, window=100, documents="in order"),
    "documents and bias": Form(PLAIN, mask="added", documents="in order"),
    "documents, heads of 256": Form((1, 4, 2, 520, 520, 256, 256), is_causal=True, documents="in order"),
    "both results": Form(WIDE, is_causal=True, both=True, dtypes=HALF),
    "torch's kernel": Form(PLAIN, implementation="aten", dtypes=HALF),
    "torch's kernel, causal, grouped": Form(WIDE, is_causal=True, implementation="aten", dtypes=HALF),
    "torch's kernel forward, ours backward": Form(WIDE, is_causal=True, both=True, implementation="aten"),
}


def attention_accuracy_cases(place: Place) -> list[Case]:
    return [
        Case("accuracy", f"accuracy: attention {name}, {str(dtype).removeprefix('torch.')}", _run(place, name, form, dtype))
        for name, form in FORMS.items()
        for dtype in form.dtypes
    ]


def _run(place: Place, name: str, form: Form, dtype: torch.dtype) -> Any:
    def run(only_compile: bool) -> list[Row]:
        return check(place, name, form, dtype)

    return run


def check(place: Place, name: str, form: Form, dtype: torch.dtype) -> list[Row]:
    shape = _tiny(form.shape) if place.tiny else form.shape
    batch, heads, groups, length, key_length, size, value_size = shape
    operands = [_heads(place, batch, heads, length, size, dtype)]
    operands += [_heads(place, batch, groups, key_length, each, dtype) for each in (size, value_size)]
    mask = _mask(place, form.mask, shape)
    if form.mask == "added":
        operands.append(place.draw(1, heads, length, key_length, dtype=dtype))
    draws, keep = _dropout(place, form, shape)
    documents = _documents(place, form.documents, shape)

    def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = mask) -> Any:
        return attention(query, key, value, bias, *documents, *draws, **form.options())[: 1 + form.both]

    def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = mask) -> Any:
        return written_out(query, key, value, bias, keep, documents, form)[: 1 + form.both]

    return compared("attention", name, ours, plain, operands)


def _tiny(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, heads, groups, length, key_length, size, value_size = shape
    lengths = tuple(min(each, TINY_LENGTH + (each == max(length, key_length))) for each in (length, key_length))
    return 1, heads, groups, *lengths, min(size, TINY_SIZE), min(value_size, TINY_SIZE)


def _heads(place: Place, batch: int, heads: int, length: int, size: int, dtype: torch.dtype) -> Tensor:
    """As a model has them: split off the last dim, then transposed."""
    return place.draw(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def _mask(place: Place, kind: str, shape: tuple[int, ...]) -> Tensor | None:
    """bool; an added mask is an operand instead."""
    batch, heads, _, length, key_length = shape[:5]
    first = torch.tensor([0], device=place.device)
    if kind == "bool":
        return (torch.rand(batch, heads, length, key_length, device=place.device) > 0.4).index_fill(-1, first, True)
    if kind == "keys":
        return (torch.rand(batch, 1, 1, key_length, device=place.device) > 0.4).index_fill(-1, first, True)
    if kind == "empty rows":
        return (torch.rand(batch, 1, length, key_length, device=place.device) > 0.4).index_fill(-2, first, False)
    return None


def _documents(place: Place, kind: str, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Ids of queries and of keys, of about a hundred tokens a document, in order or not."""
    if not kind:
        return None, None
    batch, _, _, length, key_length = shape[:5]
    ids = [torch.randint(0, 1 + max(length, key_length) // 100, (batch, each), device=place.device) for each in (length, key_length)]
    of_query, of_key = (each.sort().values if kind == "in order" else each for each in ids)
    return of_query, of_key


def _dropout(place: Place, form: Form, shape: tuple[int, ...]) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """What dropout is drawn from, rows, word and columns; and what it multiplies probabilities by, drawn in plain ops."""
    if not form.drops:
        return (None, None, None), None
    batch, heads, _, length, key_length = shape[:5]
    rows = torch.arange(batch * heads * length, device=place.device).reshape(batch, heads, length, 1) * key_length + START
    second, columns = torch.tensor(WORD, device=place.device), torch.arange(key_length, device=place.device)
    options = form.options()
    return (rows, second, columns), (drawn(rows, second, columns) < options["keep_below"]) * options["keep_scale"]


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    documents: tuple[Tensor | None, Tensor | None],
    form: Form,
) -> tuple[Tensor, Tensor]:
    """(out, log_sum_exp), every op rounding to the dtype of the query."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * form.options()["scale"]
    if form.soft_cap:
        scores = form.soft_cap * (scores / form.soft_cap).tanh()
    attends = _attends(scores, form)
    if documents[0] is not None and documents[1] is not None:
        attends = attends & (documents[0][:, None, :, None] == documents[1][:, None, None, :])
    if mask is not None:
        scores, attends = (scores, attends & mask) if mask.dtype == torch.bool else (scores + mask, attends)
    # A row that attends to nothing: a softmax over equal scores, then zeros.
    weights = scores.masked_fill(~attends, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~attends, 0.0)
    # -inf only where the row has a key: the gradient of a logarithm of nothing is NaN.
    empty = ~attends.any(-1, keepdim=True)
    log_sum_exp = scores.masked_fill(~attends & ~empty, -torch.inf).logsumexp(-1).masked_fill(empty.squeeze(-1), 0.0)
    return (weights if keep is None else weights * keep.to(weights.dtype)) @ value, log_sum_exp


def _attends(scores: Tensor, form: Form) -> Tensor:
    """bool [B, H, S, T], by positions alone."""
    s, t = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
    attends = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if form.is_causal:
        attends = attends & (t <= s[:, None])
    if form.window:
        attends = attends & ((s[:, None] - t).abs() < form.window)
    return attends.expand(scores.shape)
