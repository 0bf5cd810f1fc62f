"""What an activation written by hand computes of its operand: a polynomial with known coefficients, or nothing that we can read."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ops.spellings import PRODUCTS, QUOTIENTS, is_cast

aten = torch.ops.aten

SUMS = (aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor)
DIFFERENCES = (aten.sub.Tensor, aten.sub.Scalar, aten.sub_.Tensor)
_NEGATIONS = (aten.neg.default, aten.neg_.default)
_MOST_DEGREES = 4

# Coefficients by degree.
Polynomial = dict[int, float]


def polynomial(value: Any, variable: set[Node], constants: Constants, interior: set[Node]) -> Polynomial | None:
    """`value` in terms of the nodes `variable`, which all hold the same. `interior` gets the nodes between."""
    if isinstance(value, Node) and value in variable:
        return {1: 1.0}
    if not isinstance(value, Node) or tensor_of(value).numel() == 1:
        number = constants.number(value)
        return None if number is None else {0: number}
    found = _of_node(value, variable, constants, interior)
    if found is not None:
        interior.add(value)
    return found


def _of_node(node: Node, variable: set[Node], constants: Constants, interior: set[Node]) -> Polynomial | None:
    def of(value: Any) -> Polynomial | None:
        return polynomial(value, variable, constants, interior)

    if is_cast(node):
        return of(node.args[0])
    if node.target in _NEGATIONS:
        return _times(of(node.args[0]), {0: -1.0})
    if node.target in SUMS or node.target in DIFFERENCES:
        factor = float(node.kwargs.get("alpha", 1.0))  # type: ignore[arg-type]
        sign = factor if node.target in SUMS else -factor
        return _plus(of(node.args[0]), _times(of(node.args[1]), {0: sign}))
    if node.target in PRODUCTS:
        return _times(of(node.args[0]), of(node.args[1]))
    if node.target in QUOTIENTS:
        under = of(node.args[1])
        return _times(of(node.args[0]), {0: 1.0 / under[0]}) if under is not None and set(under) == {0} and under[0] else None
    if node.target is aten.square.default:
        return _power(of(node.args[0]), 2)
    if node.target in (aten.pow.Tensor_Scalar, aten.pow_.Scalar):
        return _power(of(node.args[0]), constants.number(node.args[1]))
    return None


def _plus(left: Polynomial | None, right: Polynomial | None) -> Polynomial | None:
    if left is None or right is None:
        return None
    found = {degree: left.get(degree, 0.0) + right.get(degree, 0.0) for degree in left.keys() | right.keys()}
    return {degree: value for degree, value in found.items() if value != 0.0}


def _times(left: Polynomial | None, right: Polynomial | None) -> Polynomial | None:
    if left is None or right is None or max([0, *left]) + max([0, *right]) > _MOST_DEGREES:
        return None
    found: Polynomial = {}
    for one, first in left.items():
        for other, second in right.items():
            found[one + other] = found.get(one + other, 0.0) + first * second
    return found


def _power(base: Polynomial | None, exponent: float | None) -> Polynomial | None:
    if exponent is None or exponent != int(exponent) or not 1 <= exponent <= _MOST_DEGREES:
        return None
    found: Polynomial | None = {0: 1.0}
    for _ in range(int(exponent)):
        found = _times(found, base)
    return found
