"""Distances between the rows of two tables: each pair by itself."""

from __future__ import annotations

from torch.fx import Node

from autopar.ir.program import operands
from autopar.ops.rule import Labels, Rule, rule
from autopar.ops.rules.labels import aten, broadcast, shape_of


def _rows(operand: Node, pairs: Node, *last: str | None) -> Labels:
    """Labels of a table, or of pairs: leading dims broadcast against those of `pairs`, and the last two."""
    return (*broadcast(shape_of(operand)[:-2], shape_of(pairs)[:-2]), *last)


@rule(aten._cdist_forward.default)
def distances(node: Node) -> Rule:
    """(left[*batch, p, m], right[*batch, r, m], …) → [*batch, p, r]."""
    left, right = operands(node)
    return Rule((_rows(left, node, "p", None), _rows(right, node, "r", None)), (_rows(node, node, "p", "r"),))


@rule(aten._cdist_backward.default)
def distances_backward(node: Node) -> Rule:
    """(gradient[*batch, p, r], left, right, norm, distances) → gradient of left, a sum over r; each m by itself."""
    gradient, left, right, pairs = operands(node)
    labels = (_rows(gradient, pairs, "p", "r"), _rows(left, pairs, "p", "m"), _rows(right, pairs, "r", "m"), _rows(pairs, pairs, "p", "r"))
    return Rule(labels, (_rows(node, pairs, "p", "m"),), linear=(frozenset({0}),))
