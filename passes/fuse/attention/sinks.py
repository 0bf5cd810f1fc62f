"""A softmax with a sink: a score of no key takes part, and its probability is dropped (gpt-oss).

    probabilities = softmax([scores, sink])[…, :-1]        = softmax(scores) · sigmoid(log_sum_exp(scores) − sink)

A row that attends to nothing leaves all its weight to the sink: it is 0 on both sides.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.ir.arguments import arguments, int_at
from autopar.ir.fusion import NotFusible
from autopar.ops.traits import CASTS
from autopar.passes.fuse.attention.softmax import Softmax, softmax_at

aten = torch.ops.aten

_SAME = (*CASTS, aten.contiguous.default, aten.clone.default, aten.alias.default)
_SPLITS = (aten.split_with_sizes.default, aten.split.sizes, aten.split.Tensor, aten.tensor_split.indices)


def sunk_softmax_at(node: Node) -> Softmax | None:
    """The softmax with a sink whose result without the sink is `node`. Raises `NotFusible` where other columns are dropped."""
    kept = _kept(node)
    if kept is None:
        return None
    source, dim, start, size, interior = kept
    source = _above_casts(source, interior)
    softmax = softmax_at(source)
    if softmax is None or softmax.dim != dim:
        return None
    interior |= softmax.interior
    joined = _above_casts(softmax.scores, interior)
    parts = _joined(joined, dim)
    if parts is None:
        return None
    interior.add(joined)
    scores, sink = parts if start == 0 else parts[::-1]
    if tensor_of(scores).shape[dim] != size:
        raise NotFusible("the columns of the softmax that are dropped are not those beside the scores")
    if tensor_of(sink).shape[dim] != 1:
        raise NotFusible(f"{tensor_of(sink).shape[dim]} columns of the softmax are dropped, and one can be a sink")
    return replace(softmax, node=node, scores=scores, interior=frozenset(interior), spelled=f"{softmax.spelled} with a sink", sink=sink)


def _kept(node: Node) -> tuple[Node, int, int, int, set[Node]] | None:
    """(of which value, dim, first column, number of columns, the nodes that take it) where `node` is a part of a value along one dim."""
    source, interior = node.args[0] if node.args else None, {node}
    if not isinstance(source, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node.target is operator.getitem and source.target in _SPLITS:
        return _split(node, source)
    if node.target not in (aten.slice.Tensor, aten.narrow.default):
        return None
    before = tensor_of(source)
    given: list[Any] = [*arguments(node), *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start = int(given[1]), int(given[2] or 0)
    if node.target is aten.slice.Tensor and given[4] != 1:
        return None
    dim %= before.dim()
    return source, dim, start % before.shape[dim], tensor_of(node).shape[dim], interior


def _split(node: Node, split: Node) -> tuple[Node, int, int, int, set[Node]] | None:
    source, position = split.args[0], node.args[1]
    parts = split.meta["val"]
    if not isinstance(source, Node) or not isinstance(position, int):
        return None
    dim = int(split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)) % tensor_of(source).dim()  # type: ignore[arg-type]
    start = sum(part.shape[dim] for part in parts[:position])
    return source, dim, start, tensor_of(node).shape[dim], {node, split}


def _above_casts(node: Node, interior: set[Node]) -> Node:
    while node.target in _SAME and isinstance(node.args[0], Node):
        interior.add(node)
        node = node.args[0]
    return node


def _joined(node: Node, dim: int) -> tuple[Node, Node] | None:
    """The two values that stand beside each other along `dim`."""
    if node.target not in (aten.cat.default, aten.concat.default):
        return None
    parts, along = arguments(node)[0], int_at(node, 1) if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or int(along) % tensor_of(node).dim() != dim:  # type: ignore[arg-type]
        return None
    first, second = parts
    assert isinstance(first, Node) and isinstance(second, Node)
    return first, second
