"""A softmax in every spelling: the op, exp of a log-softmax, or exponentials over their sum, shifted or not; with a sink or without.

With a sink a score of no key takes part, and its probability is dropped (gpt-oss):

    probabilities = softmax([scores, sink])[…, :-1]        = softmax(scores) · sigmoid(log_sum_exp(scores) − sink)

A row that attends to nothing leaves all its weight to the sink: it is 0 on both sides.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.ir.arguments import arguments, int_at, node_at
from autopar.ir.fusion import NotFusible
from autopar.ops.rules.labels import argument
from autopar.ops.traits import CASTS, COPIES, EXPANSIONS, QUOTIENTS
from autopar.passes.fuse.reading import addends, is_tensor, operand_pairs

aten = torch.ops.aten

_OPS: dict[object, str] = {
    **dict.fromkeys((aten.softmax.int, aten._softmax.default, aten.special_softmax.default), "softmax"),
    aten._safe_softmax.default: "safe softmax",
}
_LOG_OPS = (aten.log_softmax.int, aten._log_softmax.default, aten.special_log_softmax.default)
_EXPONENTIALS = (aten.exp.default, aten.exp_.default)
_REPEATED = (*COPIES, *EXPANSIONS, aten.detach.default)
_SPLITS = (aten.split_with_sizes.default, aten.split.sizes, aten.split.Tensor, aten.tensor_split.indices)


@dataclass(frozen=True)
class Softmax:
    """softmax of `scores` over `dim`, which is not negative, computed in `dtype`.

    With `sink`, one more score than those of the keys, whose probability is left out.
    """

    node: Node
    scores: Node
    dim: int
    spelled: str
    dtype: torch.dtype
    sink: Node | None = None


def softmax_at(node: Node) -> Softmax | None:
    """The softmax whose result is `node`. Raises `NotFusible` for exponentials over something else than their sum."""
    if node.target in _OPS:
        return _made(node, node.args[0], node.args[1], _OPS[node.target])
    if node.target in _EXPONENTIALS:
        return _exponential(node)
    if node.target in QUOTIENTS and _is_exponential(node.args[0]):
        return _quotient(node, node_at(node, 0), arguments(node)[1])
    if node.target is aten.mul.Tensor:
        for exponential, factor in operand_pairs(node):
            if _is_exponential(exponential) and isinstance(factor, Node) and factor.target is aten.reciprocal.default:
                return _quotient(node, exponential, node_at(factor, 0))
    return None


def sunk_softmax_at(node: Node) -> Softmax | None:
    """The softmax with a sink whose result without the sink is `node`. Raises `NotFusible` where other columns are dropped."""
    kept = _kept(node)
    if kept is None:
        return None
    source, dim, start, size = kept
    softmax = softmax_at(_above_casts(source))
    if softmax is None or softmax.dim != dim:
        return None
    parts = _joined(_above_casts(softmax.scores), dim)
    if parts is None:
        return None
    scores, sink = parts if start == 0 else parts[::-1]
    if tensor_of(scores).shape[dim] != size:
        raise NotFusible("the columns of the softmax that are dropped are not those beside the scores")
    if tensor_of(sink).shape[dim] != 1:
        raise NotFusible(f"{tensor_of(sink).shape[dim]} columns of the softmax are dropped, and one can be a sink")
    return replace(softmax, node=node, scores=scores, spelled=f"{softmax.spelled} with a sink", sink=sink)


def _made(node: Node, scores: Any, dim: Any, spelled: str) -> Softmax:
    dim %= tensor_of(scores).dim()
    shifted = addends(scores)
    if shifted is not None and isinstance(shifted[1], Node) and _is_shift(shifted[1], shifted[0], dim):
        scores = shifted[0]
    return Softmax(node, scores, dim, spelled, tensor_of(node).dtype)


def _is_exponential(value: Any) -> bool:
    return isinstance(value, Node) and value.target in _EXPONENTIALS


def _exponential(node: Node) -> Softmax | None:
    """exp(log_softmax(x)), or exp(x − logsumexp(x))."""
    inner = node.args[0]
    assert isinstance(inner, Node)
    if inner.target in _LOG_OPS:
        return _made(node, inner.args[0], inner.args[1], "exp of a log-softmax")
    scores, total, factor = addends(inner) or (None, None, None)
    dim = _reduced(total, {aten.logsumexp.default}, scores) if factor == -1.0 and isinstance(total, Node) else None
    return None if dim is None else _made(node, scores, dim, "exp of scores − logsumexp")


def _quotient(node: Node, exponential: Node, total: Any) -> Softmax:
    dim = _reduced(total, {aten.sum.dim_IntList}, exponential) if isinstance(total, Node) else None
    if dim is None:
        raise NotFusible("its exponentials are divided by something else than their sum, which is no softmax")
    return _made(node, exponential.args[0], dim, "exp(scores) / sum by hand")


def _is_shift(value: Node, scores: Any, dim: int) -> bool:
    """Whether `value` is the largest score of each row, or of all; a softmax is the same for any such shift."""
    while value.target in _REPEATED:
        value = node_at(value, 0)
    is_largest = value.target is aten.max.default and value.args[0] is scores
    return is_largest or _reduced(value, {aten.amax.default, aten.max.dim, aten.logsumexp.default}, scores) == dim


def _reduced(value: Node, targets: set[Any], operand: Any) -> int | None:
    """The one dim over which `value` is a reduction of `operand` that keeps it with size 1."""
    kept = None
    while value.target in (*_REPEATED, aten.unsqueeze.default, operator.getitem):
        if value.target is aten.unsqueeze.default:
            kept = int_at(value, 1)
        elif value.target is operator.getitem and value.args[1] != 0:
            return None
        value = node_at(value, 0)
    inner = value.args[0] if value.args else None
    while isinstance(inner, Node) and inner is not operand and inner.target is aten.detach.default:
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
    return dim if keeps or (kept is not None and int(kept) % num_dims == dim) else None


def _kept(node: Node) -> tuple[Node, int, int, int] | None:
    """(of which value, dim, first column, number of columns) where `node` is a part of a value along one dim."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not is_tensor(node):
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
    return source, dim, start % before.shape[dim], tensor_of(node).shape[dim]


def _split(node: Node, split: Node) -> tuple[Node, int, int, int] | None:
    source, position = split.args[0], node.args[1]
    parts = split.meta["val"]
    if not isinstance(source, Node) or not isinstance(position, int):
        return None
    dim = int(argument(split, 2, "dim", 0)) % tensor_of(source).dim()
    start = sum(part.shape[dim] for part in parts[:position])
    return source, dim, start, tensor_of(node).shape[dim]


def _above_casts(node: Node) -> Node:
    while node.target in (*CASTS, *COPIES) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _joined(node: Node, dim: int) -> tuple[Node, Node] | None:
    """The two values that stand beside each other along `dim`."""
    if node.target not in (aten.cat.default, aten.concat.default):
        return None
    parts, along = arguments(node)[0], int(argument(node, 1, "dim", 0))
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or along % tensor_of(node).dim() != dim:
        return None
    first, second = parts
    assert isinstance(first, Node) and isinstance(second, Node)
    return first, second
