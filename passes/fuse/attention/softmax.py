"""A softmax in every spelling: the op, exp of a log-softmax, or exponentials over their sum, shifted or not."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.ir.arguments import arguments, int_at, node_at
from autopar.ir.fusion import NotFusible

aten = torch.ops.aten

_OPS: dict[object, str] = {
    aten.softmax.int: "softmax",
    aten._softmax.default: "softmax",
    aten.special_softmax.default: "softmax",
    aten._safe_softmax.default: "safe softmax",
}
_LOG_OPS = (aten.log_softmax.int, aten._log_softmax.default, aten.special_log_softmax.default)
_DIVISIONS = (aten.div.Tensor, aten.div_.Tensor)
_DIFFERENCES = (aten.sub.Tensor, aten.sub_.Tensor)
_EXPONENTIALS = (aten.exp.default, aten.exp_.default)
_COPIES = (aten.detach.default, aten.clone.default, aten.contiguous.default, aten.expand.default, aten.expand_as.default)


@dataclass(frozen=True)
class Softmax:
    """softmax of `scores` over `dim`, which is not negative; `interior` are the nodes that it is made of, `dtype` is computed in.

    With `sink`, one more score than those of the keys, whose probability is left out (`sinks.py`).
    """

    node: Node
    scores: Node
    dim: int
    interior: frozenset[Node]
    spelled: str
    dtype: torch.dtype
    sink: Node | None = None


def softmax_at(node: Node) -> Softmax | None:
    """The softmax whose result is `node`. Raises `NotFusible` for exponentials over something else than their sum."""
    if node.target in _OPS:
        return _made(node, node.args[0], node.args[1], {node}, _OPS[node.target])
    if node.target in _EXPONENTIALS:
        return _exponential(node)
    if node.target in _DIVISIONS and _is_exponential(node.args[0]):
        return _quotient(node, node_at(node, 0), arguments(node)[1], {node})
    if node.target is aten.mul.Tensor:
        for exponential, factor in (arguments(node), reversed(arguments(node))):
            if _is_exponential(exponential) and isinstance(factor, Node) and factor.target is aten.reciprocal.default:
                return _quotient(node, exponential, node_at(factor, 0), {node, factor})
    return None


def _made(node: Node, scores: Any, dim: Any, interior: set[Node], spelled: str) -> Softmax:
    dim %= tensor_of(scores).dim()
    if scores.target in _DIFFERENCES and isinstance(scores.args[1], Node):
        shift = _shift(scores.args[1], scores.args[0], dim)
        if shift is not None:
            interior, scores = interior | {scores} | shift, scores.args[0]
    return Softmax(node, scores, dim, frozenset(interior), spelled, tensor_of(node).dtype)


def _is_exponential(value: Any) -> bool:
    return isinstance(value, Node) and value.target in _EXPONENTIALS


def _exponential(node: Node) -> Softmax | None:
    """exp(log_softmax(x)), or exp(x − logsumexp(x))."""
    inner = node.args[0]
    assert isinstance(inner, Node)
    if inner.target in _LOG_OPS:
        return _made(node, inner.args[0], inner.args[1], {node, inner}, "exp of a log-softmax")
    if inner.target not in _DIFFERENCES or not isinstance(inner.args[1], Node):
        return None
    reduced = _reduced(inner.args[1], {aten.logsumexp.default}, inner.args[0])
    if reduced is None:
        return None
    return _made(node, inner.args[0], reduced[0], {node, inner, *reduced[1]}, "exp of scores − logsumexp")


def _quotient(node: Node, exponential: Node, total: Node, interior: set[Node]) -> Softmax:
    reduced = _reduced(total, {aten.sum.dim_IntList}, exponential) if isinstance(total, Node) else None
    if reduced is None:
        raise NotFusible("its exponentials are divided by something else than their sum, which is no softmax")
    dim, nodes = reduced
    interior |= {exponential, *nodes}
    scores = exponential.args[0]
    assert isinstance(scores, Node)
    return _made(node, scores, dim, interior, "exp(scores) / sum by hand")


def _shift(value: Node, scores: Any, dim: int) -> set[Node] | None:
    """The nodes that make the largest score of each row, or of all; a softmax is the same for any such shift."""
    nodes: set[Node] = set()
    while value.target in _COPIES:
        nodes.add(value)
        value = node_at(value, 0)
    if value.target is aten.max.default and value.args[0] is scores:
        return nodes | {value}
    reduced = _reduced(value, {aten.amax.default, aten.max.dim, aten.logsumexp.default}, scores)
    return nodes | reduced[1] if reduced is not None and reduced[0] == dim else None


def _reduced(value: Node, targets: set[Any], operand: Any) -> tuple[int, set[Node]] | None:
    """The one dim over which `value` is a reduction of `operand` that keeps it with size 1, and the nodes."""
    nodes: set[Node] = set()
    kept = None
    while value.target in (*_COPIES, aten.unsqueeze.default, operator.getitem):
        nodes.add(value)
        if value.target is aten.unsqueeze.default:
            kept = int_at(value, 1)
        elif value.target is operator.getitem and value.args[1] != 0:
            return None
        value = node_at(value, 0)
    inner = value.args[0] if value.args else None
    while isinstance(inner, Node) and inner is not operand and inner.target is aten.detach.default:
        nodes.add(inner)
        inner = inner.args[0]
    if value.target not in targets or inner is not operand:
        return None
    num_dims = tensor_of(operand).dim()
    dims = arguments(value)[1] if len(value.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    dim = int(dims[0]) % num_dims
    keeps = len(value.args) > 2 and bool(value.args[2])
    if not keeps and (kept is None or int(kept) % num_dims != dim):
        return None
    return dim, nodes | {value}
