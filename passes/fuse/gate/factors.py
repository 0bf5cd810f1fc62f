"""A product as numbers and factors. Casts, negations and numbers on the way to a factor are read past, and remembered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import node_at
from autopar.ops.spellings import PRODUCTS, QUOTIENTS, is_cast

aten = torch.ops.aten


@dataclass(frozen=True)
class Stage:
    """A factor is `number` · `node`, by way of the nodes `passed`."""

    node: Node
    number: float = 1.0
    passed: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class Factor:
    """`stages` of one factor of a product, from itself up to what is no product with a number; `divides` where it is divided by."""

    stages: tuple[Stage, ...]
    divides: bool = False

    @property
    def node(self) -> Node:
        return self.stages[0].node

    @property
    def core(self) -> Stage:
        return self.stages[-1]


@dataclass(frozen=True)
class Factors:
    """`number` · factors, by way of the nodes `interior`."""

    items: tuple[Factor, ...]
    number: float = 1.0
    interior: frozenset[Node] = frozenset()


def factor_of(node: Node, constants: Constants, divides: bool = False) -> Factor:
    stages = [Stage(node)]
    while (step := _past(stages[-1].node, constants)) is not None:
        last = stages[-1]
        stages.append(Stage(step[0], last.number * step[1], last.passed | {last.node}))
    return Factor(tuple(stages), divides)


def products_of(node: Node, constants: Constants) -> Iterator[Factors]:
    """`node`, a product of two tensors, as two factors, then with the first and with the second taken apart once more."""
    found = _split(Stage(node), constants)
    if found is None:
        return
    yield found
    for position, item in enumerate(found.items):
        inner = _split(item.core, constants, item.divides)
        if inner is not None:
            items = (*found.items[:position], *inner.items, *found.items[position + 1 :])
            yield Factors(items, inner.number, found.interior | inner.interior)


def _split(stage: Stage, constants: Constants, divides: bool = False) -> Factors | None:
    node = stage.node
    if node.target not in PRODUCTS and node.target not in QUOTIENTS:
        return None
    left, right = node.args[:2]
    if not (isinstance(left, Node) and isinstance(right, Node)) or any(_number(each, constants) is not None for each in (left, right)):
        return None
    second = factor_of(right, constants, divides != (node.target in QUOTIENTS))
    number = 1.0 / stage.number if divides else stage.number
    return Factors((factor_of(left, constants, divides), second), number, stage.passed | {node})


def _past(node: Node, constants: Constants) -> tuple[Node, float] | None:
    """The one operand that `node` scales by a number, and the number."""
    if is_cast(node):
        return (node_at(node, 0), 1.0) if tensor_of(node_at(node, 0)).is_floating_point() else None
    if node.target in (aten.neg.default, aten.neg_.default):
        return node_at(node, 0), -1.0
    if node.target not in PRODUCTS and node.target not in QUOTIENTS:
        return None
    left, right = node.args[:2]
    for operand, other in ((left, right), (right, left)) if node.target in PRODUCTS else ((left, right),):
        number = _number(other, constants) if isinstance(operand, Node) and _fits(operand, node) else None
        if number:
            return operand, number if node.target in PRODUCTS else 1.0 / number  # type: ignore[return-value]
    return None


def _fits(operand: Node, node: Node) -> bool:
    return tensor_of(operand).shape == tensor_of(node).shape and tensor_of(operand).is_floating_point()


def _number(value: object, constants: Constants) -> float | None:
    """Literals and tensors of one known element; larger ones are not looked at."""
    if isinstance(value, Node) and tensor_of(value).numel() != 1:
        return None
    return constants.number(value)
