"""One matched attention: the operands and options of `autopar.attention`, and the call that replaces it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.overwrites import memory_of, writers_of, written_by
from autopar.ir.keys import SITE, Site
from autopar.kernels.attention import attention
from autopar.passes.fuse.attention.conditions import Filled
from autopar.passes.fuse.attention.layout import Labels, Layout, Placed, Scaled, flat
from autopar.passes.fuse.attention.masks import Masks
from autopar.passes.fuse.attention.scores import Scores
from autopar.passes.fuse.attention.weights import Weights
from autopar.passes.fuse.match import Match

aten = torch.ops.aten


@dataclass(frozen=True)
class Heads:
    """How the labels lie on the op's dims: batches, key heads, the query heads of each, rows and keys."""

    batch: tuple[int, ...]
    groups: tuple[int, ...]
    repeats: tuple[int, ...]
    rows: tuple[int, ...]
    keys: tuple[int, ...]

    def of_queries(self, inner: tuple[int, ...]) -> Layout:
        return (self.batch, self.groups + self.repeats, self.rows, inner)

    def of_keys(self, inner: tuple[int, ...]) -> Layout:
        return (self.batch, self.groups, self.keys, inner)


@dataclass(frozen=True)
class Attention(Match):
    """The product with the values is the root, and its result carries `layout`; `inner` are the labels that `query` and `key` share.

    `columns` are those of the values alone.
    """

    layout: Layout
    query: Scaled
    key: Scaled
    value: Scaled
    sink: Placed | None
    heads: Heads
    inner: tuple[int, ...]
    columns: tuple[int, ...]
    scores: Scores
    weights: Weights
    masks: Masks
    dtype: torch.dtype
    labels: Labels

    @property
    def scale(self) -> float:
        return self.scores.scale * self.query.scale * self.key.scale

    def conditions(self) -> tuple[str, ...]:
        found, repeats = [self.weights.softmax.spelled, f"scale {self.scale:.6g}"], self.labels.size(self.heads.repeats)
        kinds = {
            f"{repeats} query heads share each key head": repeats > 1,
            f"soft cap {self.scores.soft_cap:g}": self.scores.soft_cap > 0.0,
            "causal": self.masks.is_causal,
            f"window {self.masks.window}": self.masks.window > 0,
            "a bool mask": bool(self.masks.attends),
            "an added mask": bool(self.masks.added),
            "documents": self.masks.documents is not None,
            "a scale by query": bool(self.scores.tensor_scales),
            f"dropout {self.weights.dropout:g}": self.weights.dropout > 0.0,
        }
        return (*found, *(name for name, there in kinds.items() if there), *self.masks.conditions)

    def emit(self, emit: Emitter) -> Node:
        heads = self.heads
        query = self._operand(emit, self.query, heads.of_queries(self.inner))
        key, value = (
            self._operand(emit, *each) for each in ((self.key, heads.of_keys(self.inner)), (self.value, heads.of_keys(self.columns)))
        )
        query = self._scaled(emit, query)
        mask, even = self._mask(emit)
        if even is not None:
            query = emit.call(aten.where.ScalarOther, even, query, 0.0)
        documents = self.masks.documents
        ids = (None, None) if documents is None else documents.laid_out(emit, self._scores, self.labels)
        options = {"is_causal": self.masks.is_causal, "scale": self.scale, "soft_cap": self.scores.soft_cap, "window": self.masks.window}
        result = call_attention(emit, (query, key, value), mask, ids, self.weights.dropout, **options)
        self._note_site(result)
        out = self._beside_the_sink(emit, emit.call(operator.getitem, result, 0), result)
        out = Placed(out, heads.of_queries(self.columns)).laid_out(emit, self.layout, self.labels)
        if self.weights.scale != 1.0:
            out = emit.call(aten.mul.Tensor, out, self.weights.scale)
        shape = list(tensor_of(self.root).shape)
        out = out if list(tensor_of(out).shape) == shape else emit.call(aten.reshape.default, out, shape)
        out = emit.cast(out, tensor_of(self.root).dtype)
        is_written = any(memory_of(written_by(writer)) is self.root for writer in writers_of(emit.graph))
        # The op keeps its output for the backward; a product keeps its operands alone.
        return emit.call(aten.clone.default, out) if is_written else out

    @property
    def _scores(self) -> Layout:
        return self.heads.of_queries(self.heads.keys)

    def _note_site(self, result: Node) -> None:
        """The op draws what the dropout would have drawn, position by position."""
        dropped = self.weights.dropped
        if dropped is None or (site := SITE.get(dropped.node)) is None:
            return
        order, wanted = self.labels.resolved(flat(dropped.layout)), self.labels.layout(self._scores)
        if order != flat(wanted):
            strides, stride = dict[int, int](), 1
            for label in reversed(order):
                strides[label], stride = stride, stride * self.labels.size([label])
            # What the dropout's value does not vary along, its mask does not.
            site = Site(site.number, tuple(tuple((self.labels.size([each]), strides.get(each, 0)) for each in dim) for dim in wanted))
        SITE[result] = site

    def _operand(self, emit: Emitter, source: Placed, wanted: Layout) -> Node:
        return emit.cast(source.laid_out(emit, wanted, self.labels), self.dtype)

    def _beside_the_sink(self, emit: Emitter, out: Node, result: Node) -> Node:
        """out · sigmoid(log_sum_exp − sink): the share of the weight that the sink leaves to the keys."""
        if self.sink is None:
            return out
        log_sum_exp = emit.call(operator.getitem, result, 1)
        score = emit.cast(self.sink.along(emit, self._scores[:3], self.labels), tensor_of(log_sum_exp).dtype)
        share = emit.call(aten.sigmoid.default, emit.call(aten.sub.Tensor, log_sum_exp, score))
        return emit.cast(emit.call(aten.mul.Tensor, out, emit.call(aten.unsqueeze.default, share, -1)), tensor_of(out).dtype)

    def _scaled(self, emit: Emitter, query: Node) -> Node:
        """The query times what scales the scores row by row."""
        for factor in self.scores.tensor_scales:
            value = emit.cast(factor.along(emit, self.heads.of_queries(self.inner), self.labels), self.dtype)
            query = emit.call(aten.div.Tensor if factor.divides else aten.mul.Tensor, query, value)
        return query

    def _mask(self, emit: Emitter) -> tuple[Node | None, Node | None]:
        """The mask, and rows that attend to something, where others are to weigh all keys alike."""
        attends = attended(emit, self.masks.attends, self._scores, self.labels)
        even = None
        if self.masks.even_rows and attends is not None:
            even = emit.call(aten.any.dim, attends, -1, True)
            attends = emit.call(aten.logical_or.default, attends, emit.call(aten.logical_not.default, even))
        added = self._added(emit)
        if added is not None and even is not None:
            added = emit.call(aten.where.ScalarOther, even, added, 0.0)
        if attends is None or added is None:
            return attends or added, even
        return emit.call(aten.where.ScalarOther, attends, added, -math.inf), even

    def _added(self, emit: Emitter) -> Node | None:
        found: Node | None = None
        for mask in self.masks.added:
            value = mask.along(emit, self._scores, self.labels)
            value = value if tensor_of(value).is_floating_point() else emit.cast(value, self.dtype)
            value = value if mask.scale == 1.0 else emit.call(aten.mul.Tensor, value, mask.scale)
            found = value if found is None else emit.call(aten.add.Tensor, found, value)
        return found


def call_attention(
    emit: Emitter, operands: Sequence[Node], mask: Node | None, ids: Sequence[Node | None], dropout: float, **options: Any
) -> Node:
    """The op on query, key and value [B, H, S, D], with ids of documents of rows and keys; `KeyRandom` is to draw its dropout."""
    return emit.call(attention, *operands, mask, *ids, None, None, None, **options, **dropout_options(dropout), implementation="triton")


def dropout_options(probability: float) -> dict[str, int | float]:
    """Of a dropout that `KeyRandom` is to draw; one of probability 1 leaves nothing, of whatever is drawn."""
    if probability == 0.0:
        return {"keep_below": 0, "keep_scale": 1.0}
    kept = 1.0 - probability
    return {"keep_below": max(round(kept * 2**32), 1), "keep_scale": 1.0 / kept if kept else 0.0}


def attended(emit: Emitter, masks: Sequence[Filled], scores: Layout, labels: Labels) -> Node | None:
    """The bool mask that all of `masks` make together, of four dims, of size 1 where it does not vary; None where there are none."""
    found: Node | None = None
    for mask in masks:
        value = mask.along(emit, scores, labels)
        value = value if mask.attends else emit.call(aten.logical_not.default, value)
        found = value if found is None else emit.call(aten.logical_and.default, found, value)
    return found
