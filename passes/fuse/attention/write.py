"""`autopar.attention` in the place of what was matched."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, lay_out_anew, replace, tensor_of
from autopar.graph.overwrites import memory_of, writers_of, written_by
from autopar.ir.keys import SITE, Site
from autopar.kernels.attention import attention
from autopar.passes.fuse.attention.layout import Labels, Layout, flat
from autopar.passes.fuse.attention.match import Match
from autopar.passes.fuse.attention.operand_sources import Origin
from autopar.passes.fuse.attention.relayout import arranged, broadcast_layout
from autopar.passes.fuse.attention.scores import Added, Filled

aten = torch.ops.aten


def write(found: Match) -> None:
    """Replace the match's product by the op, and erase what only led to it."""
    emit = Emitter(found.product.graph, before=found.product)
    _Writer(found, emit).write()


class _Writer:
    def __init__(self, found: Match, emit: Emitter) -> None:
        self.found, self.emit, self.labels = found, emit, found.labels

    def write(self) -> None:
        found, emit = self.found, self.emit
        query = self._operand(found.query, found.query_layout)
        key, value = self._operand(found.key, found.key_layout), self._operand(found.value, found.value_layout)
        query = self._scaled(query)
        mask, even = self._mask()
        if even is not None:
            query = emit.call(aten.where.ScalarOther, even, query, 0.0)
        options = {
            "is_causal": found.masks.is_causal,
            "scale": found.scale,
            "soft_cap": found.scores.soft_cap,
            "window": found.masks.window,
            **dropout_options(found.weights.dropout),
            "implementation": "triton",
        }
        result = emit.call(attention, query, key, value, mask, *self._documents(), None, None, None, **options)
        self._note_site(result)
        out = self._beside_the_sink(emit.call(operator.getitem, result, 0), result)
        out = arranged(emit, out, found.out_layout, found.layout, self.labels)
        if found.weights.scale != 1.0:
            out = emit.call(aten.mul.Tensor, out, found.weights.scale)
        shape = list(tensor_of(found.product).shape)
        out = out if list(tensor_of(out).shape) == shape else emit.call(aten.reshape.default, out, shape)
        out = emit.cast(out, tensor_of(found.product).dtype)
        if any(memory_of(written_by(writer)) is found.product for writer in writers_of(emit.graph)):
            # The op keeps its output for the backward; a product keeps its operands alone.
            out = emit.call(aten.clone.default, out)
        replace(found.product, out)
        for node in sorted(found.interior, reverse=True):
            if not node.users:
                node.graph.erase_node(node)
        lay_out_anew(out)

    def _note_site(self, result: Node) -> None:
        """The op draws what the dropout would have drawn, position by position."""
        if self.found.weights.dropped is None:
            return
        node, layout = self.found.weights.dropped
        if (site := SITE.get(node)) is None:
            return
        order, wanted = self.labels.resolved(flat(layout)), self.labels.layout(self._scores())
        if order != flat(wanted):
            strides, stride = dict[int, int](), 1
            for label in reversed(order):
                strides[label], stride = stride, stride * self.labels.size([label])
            # What the dropout's value does not vary along, its mask does not.
            site = Site(site.number, tuple(tuple((self.labels.size([each]), strides.get(each, 0)) for each in dim) for dim in wanted))
        SITE[result] = site

    def _operand(self, origin: Origin, wanted: Layout) -> Node:
        return self.emit.cast(arranged(self.emit, origin.node, origin.layout, wanted, self.labels), self.found.dtype)

    def _beside_the_sink(self, out: Node, result: Node) -> Node:
        """out · sigmoid(log_sum_exp − sink): the share of the weight that the sink leaves to the keys."""
        emit, sink, rows = self.emit, self.found.sink, self.found.query_layout[:3]
        if sink is None:
            return out
        log_sum_exp = emit.call(operator.getitem, result, 1)
        score = arranged(emit, sink.node, sink.layout, broadcast_layout(sink.layout, rows, self.labels), self.labels)
        score = emit.cast(score, tensor_of(log_sum_exp).dtype)
        share = emit.call(aten.sigmoid.default, emit.call(aten.sub.Tensor, log_sum_exp, score))
        return emit.cast(emit.call(aten.mul.Tensor, out, emit.call(aten.unsqueeze.default, share, -1)), tensor_of(out).dtype)

    def _scaled(self, query: Node) -> Node:
        """The query times what scales the scores row by row."""
        for factor in self.found.scores.factors:
            wanted = broadcast_layout(factor.layout, self.found.query_layout, self.labels)
            value = self.emit.cast(arranged(self.emit, factor.value, factor.layout, wanted, self.labels), self.found.dtype)
            query = self.emit.call(aten.div.Tensor if factor.divides else aten.mul.Tensor, query, value)
        return query

    def _documents(self) -> tuple[Node | None, Node | None]:
        """Ids of the rows and of the keys: [B, S] and [B, T], or one for all of B."""
        documents = self.found.masks.documents
        if documents is None:
            return None, None
        return documents.laid_out(self.emit, self._scores(), self.labels)

    def _mask(self) -> tuple[Node | None, Node | None]:
        """The mask, and rows that attend to something, where others are to weigh all keys alike."""
        emit, masks = self.emit, self.found.masks
        attends = attended(emit, masks.attends, self._scores(), self.labels)
        even = None
        if masks.even_rows and attends is not None:
            even = emit.call(aten.any.dim, attends, -1, True)
            attends = emit.call(aten.logical_or.default, attends, emit.call(aten.logical_not.default, even))
        added = self._added(masks.added)
        if added is not None and even is not None:
            added = emit.call(aten.where.ScalarOther, even, added, 0.0)
        if attends is None or added is None:
            return attends or added, even
        return emit.call(aten.where.ScalarOther, attends, added, -math.inf), even

    def _added(self, masks: list[Added]) -> Node | None:
        found: Node | None = None
        for mask in masks:
            value = _broadcast(self.emit, mask.value, mask.layout, self._scores(), self.labels)
            value = value if tensor_of(value).is_floating_point() else self.emit.cast(value, self.found.dtype)
            value = value if mask.factor == 1.0 else self.emit.call(aten.mul.Tensor, value, mask.factor)
            found = value if found is None else self.emit.call(aten.add.Tensor, found, value)
        return found

    def _scores(self) -> Layout:
        return (*self.found.query_layout[:3], self.found.key_layout[2])


def dropout_options(probability: float) -> dict[str, int | float]:
    """Of a dropout that `KeyRandom` is to draw; one of probability 1 leaves nothing, of whatever is drawn."""
    if probability == 0.0:
        return {"keep_below": 0, "keep_scale": 1.0}
    kept = 1.0 - probability
    return {"keep_below": max(round(kept * 2**32), 1), "keep_scale": 1.0 / kept if kept else 0.0}


def attended(emit: Emitter, masks: list[Filled], scores: Layout, labels: Labels) -> Node | None:
    """The bool mask that all of `masks` make together, of four dims; None where there are none."""
    found: Node | None = None
    for mask in masks:
        value = _broadcast(emit, mask.condition, mask.layout, scores, labels)
        value = value if mask.attends else emit.call(aten.logical_not.default, value)
        found = value if found is None else emit.call(aten.logical_and.default, found, value)
    return found


def _broadcast(emit: Emitter, node: Node, layout: Layout, scores: Layout, labels: Labels) -> Node:
    """A mask with four dims, of size 1 where it does not vary."""
    return arranged(emit, node, layout, broadcast_layout(layout, scores, labels), labels)
