"""Shared by all pattern matchers: reading a value past casts and factors, and the operands of a commutative op both ways round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import node_at
from autopar.ops.rules.labels import argument
from autopar.ops.traits import DIFFERENCES, NEGATIONS, PRODUCTS, QUOTIENTS, SUMS, is_cast, widens


def is_tensor(value: object) -> bool:
    """Whether `value` is a node that holds one tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def name_of(node: Node) -> str:
    """The op's name alone, as users know it: `softmax` of `aten.softmax.int`."""
    return str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)


def operand_pairs(node: Node) -> tuple[tuple[Any, Any], ...]:
    """The first two arguments, and the other way round where it makes no difference."""
    left, right = node.args[:2]
    return ((left, right),) if node.target in QUOTIENTS else ((left, right), (right, left))


def addends(node: Node) -> tuple[Any, Any, float] | None:
    """a, b and the factor of every sum and difference, a + factor · b; None for other nodes."""
    if node.target not in (*SUMS, *DIFFERENCES):
        return None
    factor = float(argument(node, 2, "alpha", 1.0))
    return node.args[0], node.args[1], -factor if node.target in DIFFERENCES else factor


def summands(node: Node) -> tuple[tuple[Any, Any], ...]:
    """(a, b) and (b, a) of every plain sum a + b."""
    found = addends(node)
    return ((found[0], found[1]), (found[1], found[0])) if found is not None and found[2] == 1.0 else ()


def number_of(value: Any, constants: Constants) -> float | None:
    """A literal, or a tensor of one element that is known. Larger ones (masks, tables) are not evaluated."""
    if isinstance(value, Node) and not (is_tensor(value) and tensor_of(value).numel() == 1):
        return None
    return constants.number(value)


def scaled(node: Node, number: Callable[[Any], float | None]) -> Iterator[tuple[Node, float]]:
    """(x, factor) of every way to read `node` as x · factor; `number` says what numbers operands are, as far as is known."""
    if node.target in NEGATIONS:
        yield node_at(node, 0), -1.0
    if node.target in PRODUCTS or node.target in QUOTIENTS:
        for value, other in operand_pairs(node):
            factor = number(other) if isinstance(value, Node) else None
            if factor is not None and (factor or node.target in PRODUCTS):
                yield value, factor if node.target in PRODUCTS else 1.0 / factor


def is_alike(value: Node, node: Node) -> bool:
    """Whether `value` holds floats in the shape of `node`: what scales it is not what gives it its shape."""
    return tensor_of(value).shape == tensor_of(node).shape and tensor_of(value).is_floating_point()


def narrowest(node: Node) -> Node:
    """What `node` is a wider copy of, itself if it is none."""
    while is_cast(node) and widens(node):
        node = node_at(node, 0)
    return node


def widened(node: Node) -> set[Node]:
    """`node` and the values that it is a wider copy of, and wider copies of these: they all hold the same."""
    pending = [narrowest(node)]
    found = set(pending)
    while pending:
        for user in pending.pop().users:
            if is_cast(user) and widens(user) and user not in found:
                found.add(user)
                pending.append(user)
    return found


def rounded(node: Node) -> Node:
    """`node`, or the cast to fewer bits that alone reads it."""
    for user in node.users if len(node.users) == 1 else ():
        if is_cast(user) and tensor_of(user).dtype.itemsize < tensor_of(node).dtype.itemsize:
            return user
    return node


def widest(*nodes: Node) -> torch.dtype:
    """The dtype that holds all of them."""
    found = tensor_of(nodes[0]).dtype
    for node in nodes[1:]:
        found = torch.promote_types(found, tensor_of(node).dtype)
    return found
