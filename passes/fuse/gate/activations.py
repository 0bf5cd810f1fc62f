"""The five activations, by name or written by hand as a product.

silu       x · sigmoid(x)                                 sigmoid(x) may be 1 / (1 + exp(-x))
gelu       x · (1 + erf(x / sqrt 2)) / 2
gelu_tanh  x · (1 + tanh(sqrt(2 / pi) · (x + 0.044715 x³))) / 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.ir.arguments import node_at
from autopar.ir.fusion import NotFusible
from autopar.ops.traits import NEGATIONS, QUOTIENTS
from autopar.passes.fuse.gate.products import Multiplicand, Product, Unscaled, multiplicand_of, polynomial, products_of
from autopar.passes.fuse.reading import number_of, summands, widened

aten = torch.ops.aten

_NAMED: dict[object, str] = {
    **dict.fromkeys((aten.silu.default, aten.silu_.default), "silu"),
    **dict.fromkeys((aten.relu.default, aten.relu_.default), "relu"),
    **dict.fromkeys((aten.sigmoid.default, aten.sigmoid_.default, aten.special_expit.default), "sigmoid"),
}
_GELUS = (aten.gelu.default, aten.gelu_.default)
# Functions of which an activation by hand is made: the activation, and what they take of its operand.
_WITHIN: dict[object, tuple[str, Polynomial]] = {
    aten.erf.default: ("gelu", Polynomial((0.0, math.sqrt(0.5)))),
    aten.special_erf.default: ("gelu", Polynomial((0.0, math.sqrt(0.5)))),
    aten.tanh.default: ("gelu_tanh", math.sqrt(2 / math.pi) * Polynomial((0.0, 1.0, 0.0, 0.044715))),
}
# Coefficients that are this near mean the same: they are written with ten digits.
_TOLERANCE = 1e-10


@dataclass(frozen=True)
class Activated:
    """`number` · `kind`(`gate`), made by the nodes `interior`; what is left of the product are the factors `rest`."""

    kind: str
    gate: Node
    number: float
    interior: frozenset[Node]
    rest: tuple[Multiplicand, ...] = ()
    by_hand: bool = False


def activation_at(node: Node, constants: Constants) -> Activated | None:
    """The activation whose value `node` is."""
    factor = multiplicand_of(node, constants)
    found = named(factor, constants)
    if found is None and (product := next(products_of(factor.core.node, constants), None)) is not None:
        product = Product(product.items, factor.core.number * product.number, factor.core.passed | product.interior)
        found = next((each for each in by_hand(product, constants) if not each.rest), None)
    return found if found is not None and math.isclose(found.number, 1.0, rel_tol=_TOLERANCE) else None


def named(factor: Multiplicand, constants: Constants) -> Activated | None:
    """One factor that is an activation, or 1 / (1 + exp(-x))."""
    core = factor.core
    kind = _NAMED.get(core.node.target)
    if core.node.target in _GELUS:
        kind = "gelu" if core.node.kwargs.get("approximate", "none") == "none" else "gelu_tanh"
    if kind is not None and not factor.divides:
        return Activated(kind, node_at(core.node, 0), core.number, core.passed | {core.node})
    logistic = _logistic(factor, constants)
    return None if logistic is None else Activated("sigmoid", *logistic, by_hand=True)


def by_hand(product: Product, constants: Constants) -> Iterator[Activated]:
    """The activations that two factors of `product` make up together. Raises `NotFusible` for one that is nearly gelu."""
    for first in product.items:
        for second in product.items:
            if first is second or first.divides:
                continue
            rest = tuple(item for item in product.items if item is not first and item is not second)
            yield from _pair(first.readings, second, product, rest, constants)


def _pair(
    readings: Sequence[Unscaled], second: Multiplicand, product: Product, rest: tuple[Multiplicand, ...], constants: Constants
) -> Iterator[Activated]:
    """x · h(x): `readings` are what x may be, `second` holds h."""
    gated = named(second, constants)
    for reading in readings:
        same = widened(reading.node)
        interior = product.interior | reading.passed
        if gated is not None and gated.kind == "sigmoid" and not same.isdisjoint(widened(gated.gate)):
            number = product.number * reading.number * gated.number
            yield Activated("silu", reading.node, number, interior | gated.interior, rest, by_hand=True)
            return
        found = None if second.divides else _one_plus(second.core, same, constants, bool(rest))
        if found is not None:
            kind, number, inside = found
            number *= product.number * reading.number * second.core.number / 0.5
            yield Activated(kind, reading.node, number, interior | second.core.passed | inside, rest, by_hand=True)
            return


def _logistic(factor: Multiplicand, constants: Constants) -> tuple[Node, float, frozenset[Node]] | None:
    """x, the number and the nodes of number / (1 + exp(-x))."""
    reading, interior = factor.core, factor.core.passed
    number = 1.0 / reading.number if factor.divides and reading.number else reading.number
    total: Any = reading.node
    if not factor.divides:
        above = (
            1.0 if total.target is aten.reciprocal.default else number_of(total.args[0], constants) if total.target in QUOTIENTS else None
        )
        if above is None:
            return None
        number, total, interior = number * above, total.args[total.target in QUOTIENTS], interior | {total}
    for one, exponential in summands(total) if isinstance(total, Node) else ():
        if number_of(one, constants) == 1.0 and isinstance(exponential, Node) and exponential.target is aten.exp.default:
            negated = node_at(exponential, 0)
            if negated.target in NEGATIONS:
                return node_at(negated, 0), number, interior | {total, exponential, negated}
    return None


def _one_plus(reading: Unscaled, same: set[Node], constants: Constants, is_gate: bool) -> tuple[str, float, frozenset[Node]] | None:
    """The activation, the number a and the nodes, where `reading` is a + a · h(x) and h what an activation by hand is made of."""
    for number, other in summands(reading.node):
        value = number_of(number, constants)
        if value is None or not isinstance(other, Node):
            continue
        core = multiplicand_of(other, constants).core
        if core.node.target not in _WITHIN or value == 0.0 or not math.isclose(core.number, value, rel_tol=_TOLERANCE):
            continue
        kind, wanted = _WITHIN[core.node.target]
        interior = {reading.node, core.node, *core.passed}
        found = polynomial(core.node.args[0], same, constants, interior)
        if found is None:
            continue
        if _is_near(found, wanted):
            return kind, value, frozenset(interior)
        if is_gate and np.array_equal(found.coef != 0.0, wanted.coef != 0.0):
            raise NotFusible(f"its activation is not {kind}: {_written(found)} stands where {kind} has {_written(wanted)}")
    return None


def _is_near(found: Polynomial, wanted: Polynomial) -> bool:
    return found.degree() == wanted.degree() and np.allclose(found.coef, wanted.coef, rtol=_TOLERANCE, atol=0.0)


def _written(terms: Polynomial) -> str:
    return " + ".join(f"{value:.12g} x^{degree}" for degree, value in enumerate(terms.coef) if value != 0.0)
