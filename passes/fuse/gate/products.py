"""Takes products apart into numbers and tensors, and reads one tensor as a polynomial of another (x + 0.044715 x³)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.polynomial import Polynomial
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import node_at
from autopar.ops.traits import DIFFERENCES, NEGATIONS, PRODUCTS, QUOTIENTS, SUMS, is_cast
from autopar.passes.fuse.reading import addends, is_alike, number_of, scaled

aten = torch.ops.aten

_POWERS = (aten.square.default, aten.pow.Tensor_Scalar, aten.pow_.Scalar)
_MOST_DEGREES = 4


@dataclass(frozen=True)
class Unscaled:
    """A factor is `number` · `node`, by way of the nodes `passed`."""

    node: Node
    number: float = 1.0
    passed: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class Multiplicand:
    """`readings` of one factor of a product, from itself up to what is no product with a number; `divides` where it is divided by."""

    readings: tuple[Unscaled, ...]
    divides: bool = False

    @property
    def node(self) -> Node:
        return self.readings[0].node

    @property
    def core(self) -> Unscaled:
        return self.readings[-1]


@dataclass(frozen=True)
class Product:
    """`number` · factors, by way of the nodes `interior`."""

    items: tuple[Multiplicand, ...]
    number: float = 1.0
    interior: frozenset[Node] = frozenset()


def multiplicand_of(node: Node, constants: Constants, divides: bool = False) -> Multiplicand:
    """`node` as one factor. Casts, negations and numbers on the way up are read past, and remembered."""
    readings = [Unscaled(node)]
    while (step := _past(readings[-1].node, constants)) is not None:
        last = readings[-1]
        readings.append(Unscaled(step[0], last.number * step[1], last.passed | {last.node}))
    return Multiplicand(tuple(readings), divides)


def products_of(node: Node, constants: Constants) -> Iterator[Product]:
    """`node`, a product of two tensors, as two factors, then with the first and with the second taken apart once more."""
    found = _split(Unscaled(node), constants)
    if found is None:
        return
    yield found
    for position, item in enumerate(found.items):
        inner = _split(item.core, constants, item.divides)
        if inner is not None:
            items = (*found.items[:position], *inner.items, *found.items[position + 1 :])
            yield Product(items, inner.number, found.interior | inner.interior)


def _split(reading: Unscaled, constants: Constants, divides: bool = False) -> Product | None:
    node = reading.node
    if node.target not in PRODUCTS and node.target not in QUOTIENTS:
        return None
    left, right = node.args[:2]
    if not (isinstance(left, Node) and isinstance(right, Node)) or any(number_of(each, constants) is not None for each in (left, right)):
        return None
    second = multiplicand_of(right, constants, divides != (node.target in QUOTIENTS))
    number = 1.0 / reading.number if divides else reading.number
    return Product((multiplicand_of(left, constants, divides), second), number, reading.passed | {node})


def _past(node: Node, constants: Constants) -> tuple[Node, float] | None:
    """The one operand that `node` scales by a number, and the number."""
    if is_cast(node):
        return (node_at(node, 0), 1.0) if tensor_of(node.args[0]).is_floating_point() else None
    known = scaled(node, lambda value: number_of(value, constants))
    return next(((value, factor) for value, factor in known if factor and is_alike(value, node)), None)


def polynomial(value: Any, variable: set[Node], constants: Constants, interior: set[Node]) -> Polynomial | None:
    """`value` in terms of the nodes `variable`, which all hold the same. `interior` gets the nodes between."""
    known: dict[Node, Polynomial | None] = {}  # of x + f(x) both operands lead to x

    def of(value: Any) -> Polynomial | None:
        if isinstance(value, Node) and value in variable:
            return Polynomial((0.0, 1.0))
        if not isinstance(value, Node) or tensor_of(value).numel() == 1:
            number = constants.number(value)
            return None if number is None or not math.isfinite(number) else Polynomial((number,))
        if value not in known:
            found = _of_node(value, of, constants)
            known[value] = None if found is None or found.degree() > _MOST_DEGREES else found.trim()
            if known[value] is not None:
                interior.add(value)
        return known[value]

    return of(value)


def _of_node(node: Node, of: Callable[[Any], Polynomial | None], constants: Constants) -> Polynomial | None:
    if is_cast(node):
        return of(node.args[0])
    if node.target in NEGATIONS:
        found = of(node.args[0])
        return None if found is None else -found
    if node.target in _POWERS:
        found, exponent = of(node.args[0]), 2.0 if node.target is aten.square.default else constants.number(node.args[1])
        return None if found is None or exponent is None or exponent not in range(1, _MOST_DEGREES + 1) else found ** int(exponent)
    if node.target not in (*SUMS, *DIFFERENCES, *PRODUCTS, *QUOTIENTS):
        return None
    left, right, factor = addends(node) or (*node.args[:2], None)
    first, second = of(left), of(right)
    if first is None or second is None:
        return None
    if node.target in QUOTIENTS:
        return first / second.coef[0] if second.degree() == 0 and second.coef[0] else None
    return first * second if factor is None else first + second * factor
