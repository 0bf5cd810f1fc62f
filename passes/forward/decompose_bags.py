"""Bags of equal length become lookups and a reduction over each bag, ops that are split like any other.

    rows = weight[ids]                                  [bags, length, columns]
    sum  = Σ rows · weight of the sample, mean = Σ rows / length, max = the largest of each column
    With a padding id its rows are 0, and a mean divides by the number of the others, or by 1 where there are none.

That is what `nn.EmbeddingBag` and `F.embedding_bag` do with ids of two dims. Bags whose offsets are data stay one op, which has no rule.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, replace, tensor_of
from autopar.ir.arguments import all_named
from autopar.ir.program import Program
from autopar.kernels.registration import accumulation_dtype

aten = torch.ops.aten

# The numbers by which ATen schemas name modes.
_MEAN, _MAX = 1, 2


@dataclass(frozen=True)
class DecomposeBags:
    """Embedding bags of equal length.

    Reads: a FORWARD program.
    Writes: plain ATen ops in the place of `aten.embedding_bag`, summed in float32, in float64 for float64.
    Ensures: the result has the shape and dtype of torch's. Of a max over bags with a padding id, and of gradients that are sparse or
        scaled by frequency, nothing is changed.
    """

    name: str = "decompose bags"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        for node in list(program.graph.nodes):
            if node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx):
                _decompose(node, all_named(node))
        return program


def _decompose(node: Node, given: dict[str, Any]) -> None:
    length, results = _length(given["offsets"], given["indices"]), list(node.users)
    is_plain = not given["scale_grad_by_freq"] and not given["sparse"] and not given["include_last_offset"]
    only_bags = all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in results)
    padding = given.get("padding_idx")
    if length is None or not is_plain or not only_bags or (given["mode"] == _MAX and padding is not None):
        return
    emit = Emitter(node.graph, before=node)
    bags = _reduced(emit, given, length, padding)
    for user in results:
        if user.args[1] == 0:
            replace(user, bags)
        else:
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _length(offsets: Any, ids: Any) -> int | None:
    """Of every bag; None where they differ, or may."""
    if not isinstance(offsets, Node) or offsets.target is not aten.arange.start_step:
        return None
    given = all_named(offsets)
    start, end, step = given["start"], given["end"], given["step"]
    return step if start == 0 and end == tensor_of(ids).numel() > 0 and end % step == 0 else None


def _reduced(emit: Emitter, given: dict[str, Any], length: int, padding: int | None) -> Node:
    weight = given["weight"]
    ids = _by_bag(emit, given["indices"], length)
    rows = emit.call(aten.embedding.default, weight, ids)
    if given["mode"] == _MAX:
        return emit.call(operator.getitem, emit.call(aten.max.dim, rows, 1), 0)
    rows = emit.cast(rows, accumulation_dtype(tensor_of(weight)))
    if given.get("per_sample_weights") is not None:
        weights = emit.cast(_by_bag(emit, given["per_sample_weights"], length), tensor_of(rows).dtype)
        rows = emit.call(aten.mul.Tensor, rows, emit.call(aten.unsqueeze.default, weights, -1))
    counted = None
    if padding is not None:
        counted = emit.call(aten.ne.Scalar, ids, padding % tensor_of(weight).shape[0])
        rows = emit.call(aten.where.ScalarOther, emit.call(aten.unsqueeze.default, counted, -1), rows, 0.0)
    bags = emit.call(aten.sum.dim_IntList, rows, [1])
    if given["mode"] == _MEAN:
        number = length if counted is None else _at_least_one(emit, counted, tensor_of(bags).dtype)
        bags = emit.call(aten.div.Tensor, bags, number)
    return emit.cast(bags, tensor_of(weight).dtype)


def _by_bag(emit: Emitter, flat: Node, length: int) -> Node:
    """What lies flat, bag behind bag, by bag: as it was before it was laid flat, where that is so."""
    below = flat.args[0] if flat.target in (aten.reshape.default, aten.view.default) else None
    shape = [tensor_of(flat).numel() // length, length]
    if isinstance(below, Node) and list(tensor_of(below).shape) == shape:
        return below
    return emit.call(aten.reshape.default, flat, shape)


def _at_least_one(emit: Emitter, counted: Node, dtype: torch.dtype) -> Node:
    """How many of each bag count, [bags, 1]."""
    number = emit.call(aten.sum.dim_IntList, emit.cast(counted, dtype), [1], True)
    return emit.call(aten.clamp.default, number, 1)
