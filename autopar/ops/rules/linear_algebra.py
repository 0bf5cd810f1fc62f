"""Factors of matrices, what is solved with them, and products of vectors: those of a batch stand apart, each is needed whole."""

from __future__ import annotations

from torch.fx import Node

from autopar.ops.rule import Rule, rule
from autopar.ops.rules.labels import aligned, argument, aten, broadcast, dim_of, position_at, positional, shape_of, without


@rule(aten.linalg_lu_factor_ex.default)
def lu_factors(node: Node) -> Rule:
    """matrices[*b, m, n] → factors[*b, m, n], pivots[*b, k], info[*b]"""
    batch = positional(len(shape_of(node.args[0])) - 2)
    return Rule(((*batch, None, None),), ((*batch, None, None), (*batch, None), batch))


@rule(aten.linalg_lu_solve.default)
def lu_solve(node: Node) -> Rule:
    """(factors[*b, n, n], pivots[*b, n], right-hand sides[*b, n, k]) → [*b, n, k]; the sides stand apart, too."""
    factors, pivots, sides = node.args[:3]
    batch = shape_of(node)[:-2]
    columns = (None, "k") if argument(node, 3, "left", True) else ("k", None)
    of_factors, of_pivots, of_sides = (broadcast(shape_of(each)[:-tail], batch) for each, tail in ((factors, 2), (pivots, 1), (sides, 2)))
    pairs = [(factors, (*of_factors, None, None)), (pivots, (*of_pivots, None)), (sides, (*of_sides, *columns))]
    return Rule(aligned(node, pairs), ((*positional(len(batch)), *columns),), linear=(position_at(node, 2),))


@rule(aten.linalg_solve_triangular.default)
def solve_triangular(node: Node) -> Rule:
    """(triangle[*b, n, n], right-hand sides[*b, n, k]) → [*b, n, k]; the sides stand apart, too, and it is linear in them."""
    triangle, sides = node.args[:2]
    batch = shape_of(node)[:-2]
    columns = (None, "k") if node.kwargs.get("left", True) else ("k", None)
    pairs = [
        (triangle, (*broadcast(shape_of(triangle)[:-2], batch), None, None)),
        (sides, (*broadcast(shape_of(sides)[:-2], batch), *columns)),
    ]
    return Rule(aligned(node, pairs), ((*positional(len(batch)), *columns),), linear=(position_at(node, 1),))


@rule(aten.linalg_cross.default)
def cross_product(node: Node) -> Rule:
    """(left, right, dim): both are broadcast, and the vectors of three along the dim are needed whole."""
    result = shape_of(node)
    dim = dim_of(argument(node, 2, "dim", -1), len(result))
    left, right = (without(broadcast(shape_of(each), result), (dim,)) for each in node.args[:2])
    return Rule((left, right), (without(positional(len(result)), (dim,)),), linear=(frozenset({0}), frozenset({1})))
