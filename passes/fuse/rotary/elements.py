"""What a value is, element by element of its last dims, in terms of the elements of one x [..., D].

Rotations are linear in x and alike in all outer dims, so that slices, chunks, stacks, views and signs only move D symbols:

    x                     x0      x1      x2      x3
    cat(-x[2:], x[:2])   -x2     -x3      x0      x1
    times sin            -x2 s0  -x3 s1   x0 s2   x1 s3

A complex value has one more inner dim of two, its real and its imaginary part.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import call_of, node_at
from autopar.ir.program import operands
from autopar.ops.rules.labels import argument
from autopar.ops.traits import COPIES, DIFFERENCES, NEGATIONS, PRODUCTS, RESHAPES, SUMS, is_cast
from autopar.passes.fuse.reading import addends

aten = torch.ops.aten

_REGROUPED = (*RESHAPES, *COPIES, aten.view_as_complex.default, aten.view_as_real.default)
# Ops that only move elements, and which of their arguments is the dim that they work on.
_MOVED: dict[object, int] = {
    aten.slice.Tensor: 1, aten.select.int: 1, aten.narrow.default: 1, aten.cat.default: 1, aten.stack.default: 1, aten.unbind.int: 1,
    aten.chunk.default: 2, aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.flip.default: 1, aten.roll.default: 2,
}  # fmt: skip
# Of these, and of what only regroups, memory is shared: whoever else reads them costs nothing.
SHOWN = frozenset({*_REGROUPED, *_MOVED, operator.getitem} - {aten.cat.default, aten.stack.default, aten.flip.default, aten.roll.default})
_KNOWN = frozenset({*SUMS, *DIFFERENCES, *PRODUCTS, *NEGATIONS, *_REGROUPED, *_MOVED})


@dataclass(frozen=True)
class Angle:
    """The element `index`, counted over its last `num_inner` dims, of a value that does not depend on x."""

    node: Node
    num_inner: int
    index: int


@dataclass(frozen=True)
class Term:
    """`number` · x's element `index` · `angles`."""

    number: float
    index: int
    angles: tuple[Angle, ...] = ()


Terms = tuple[Term, ...]


def is_understood(node: Node) -> bool:
    """Whether `Elements` can look past `node`."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return node_at(node, 0).target in _MOVED
    return node.target in _KNOWN or is_cast(node)


class Elements:
    """Values in terms of `x`."""

    def __init__(self, x: Node, constants: Constants) -> None:
        self.x, self._constants = x, constants
        self._outer = tuple(tensor_of(x).shape[:-1])
        self._depends: dict[Node, bool] = {x: True}
        size = tensor_of(x).shape[-1]
        self._found: dict[Node, np.ndarray | None] = {x: _array([(Term(1.0, index),) for index in range(size)])}

    def of(self, node: Node) -> np.ndarray | None:
        """`Terms` in an array of the shape of the node's inner dims; None where they cannot be read."""
        if node not in self._found:
            found = self._of(node) if is_understood(node) and self._depends_on_x(node) else None
            self._found[node] = found if found is not None and self._fits(node, found) else None
        return self._found[node]

    def _fits(self, node: Node, found: np.ndarray) -> bool:
        return real_shape(node) == (*self._outer, *found.shape)

    def _depends_on_x(self, node: Node) -> bool:
        if node not in self._depends:
            self._depends[node] = self.x < node and node.op == "call_function" and any(map(self._depends_on_x, node.all_input_nodes))
        return self._depends[node]

    def _of(self, node: Node) -> np.ndarray | None:
        if (found := addends(node)) is not None:
            return self._sum(*found)
        if node.target in PRODUCTS:
            return self._product(node)
        if node.target in _MOVED or node.target is operator.getitem:
            return self._moved(node)
        found = self.of(node_at(node, 0))
        if found is None or is_cast(node):
            return found
        if node.target in NEGATIONS:
            return _scaled(found, -1.0)
        shape = real_shape(node)
        keeps_outer = shape[: len(self._outer)] == self._outer and len(shape) > len(self._outer)
        return found.reshape(shape[len(self._outer) :]) if keeps_outer else None

    def _sum(self, left: Any, right: Any, factor: float) -> np.ndarray | None:
        if not isinstance(left, Node) or not isinstance(right, Node):
            return None
        first, second = self.of(left), self.of(right)
        if first is None or second is None or first.shape != second.shape:
            return None
        return _array([one + other for one, other in zip(first.flat, _scaled(second, factor).flat, strict=True)], first.shape)

    def _product(self, node: Node) -> np.ndarray | None:
        left, right = node.args[:2]
        value, other = (left, right) if isinstance(left, Node) and self._depends_on_x(left) else (right, left)
        assert isinstance(value, Node)
        found = self.of(value)
        if found is None or (isinstance(other, Node) and self._depends_on_x(other)):
            return None
        if not isinstance(other, Node) or tensor_of(other).numel() == 1:
            number = self._constants.number(other)
            return None if number is None else _scaled(found, number)
        angles = self._angles(other, found.shape, tensor_of(node).is_complex())
        if angles is None:
            return None
        if tensor_of(node).is_complex():
            return _complex_product(found, angles)
        return _array([_turned(one, angle) for one, angle in zip(found.flat, angles, strict=True)], found.shape)

    def _angles(self, node: Node, inner: tuple[int, ...], is_complex: bool) -> list[Angle] | None:
        """One for each of the inner elements with which `node` is multiplied."""
        value, shape = tensor_of(node), real_shape(node)
        own = shape[len(shape) - len(inner) :]
        fits = len(own) == len(inner) and all(size in (1, whole) for size, whole in zip(own, inner, strict=True))
        if not fits or value.is_complex() != is_complex or not (is_complex or value.is_floating_point()):
            return None
        indices = np.broadcast_to(np.arange(int(np.prod(own))).reshape(own), inner)
        return [Angle(node, len(inner), int(index)) for index in indices.flat]

    def _moved(self, node: Node) -> np.ndarray | None:
        """The op run on numbers that stand for elements, the outer dims being of size 1."""
        call = node.args[0] if node.target is operator.getitem else node
        assert isinstance(call, Node)
        sources = operands(call)
        found = [self.of(each) for each in sources]
        if any(each is None for each in found) or not self._works_inside(call, tensor_of(sources[0]).dim()):
            return None
        numbers, pool = list[torch.Tensor](), list[Terms]()
        for each in found:
            assert each is not None
            indices = torch.arange(len(pool), len(pool) + each.size)
            numbers.append(indices.reshape((1,) * len(self._outer) + each.shape))
            pool += list(each.flat)
        remaining = iter(numbers)
        args, kwargs = torch.fx.map_arg((call.args, call.kwargs), lambda _: next(remaining))
        result = call_of(call)(*args, **kwargs)
        result = result if call is node else result[node.args[1]]
        return _array([pool[int(index)] for index in result.flatten()], tuple(result.shape)[len(self._outer) :])

    def _works_inside(self, call: Node, num_dims: int) -> bool:
        """Whether the dims that `call` works on are inner ones."""
        dims = argument(call, _MOVED[call.target], "dim", 0)
        num_dims += call.target is aten.stack.default
        listed = dims if isinstance(dims, (list, tuple)) else [dims]
        return bool(listed) and all(int(dim) % num_dims >= len(self._outer) for dim in listed)


def real_shape(node: Node) -> tuple[int, ...]:
    """The shape, with a last dim of two where the value is complex."""
    value = tensor_of(node)
    return (*value.shape, 2) if value.is_complex() else tuple(value.shape)


def _turned(terms: Terms, angle: Angle) -> Terms:
    return tuple(Term(each.number, each.index, (*each.angles, angle)) for each in terms)


def _complex_product(found: np.ndarray, angles: list[Angle]) -> np.ndarray:
    """(a + ib)(c + is) = (ac - bs) + i(bc + as), pair by pair."""
    flat, terms = list(found.flat), list[Terms]()
    for place in range(0, len(flat), 2):
        (real, imaginary), (cos, sin) = flat[place : place + 2], angles[place : place + 2]
        negative = tuple(Term(-each.number, each.index, each.angles) for each in _turned(imaginary, sin))
        terms += [_turned(real, cos) + negative, _turned(imaginary, cos) + _turned(real, sin)]
    return _array(terms, found.shape)


def _array(terms: list[Terms], shape: tuple[int, ...] | None = None) -> np.ndarray:
    found = np.empty(len(terms), dtype=object)
    for position, each in enumerate(terms):  # an assignment at once would take the tuples apart
        found[position] = each
    return found if shape is None else found.reshape(shape)


def _scaled(found: np.ndarray, number: float) -> np.ndarray:
    terms = [tuple(Term(number * each.number, each.index, each.angles) for each in one) for one in found.flat]
    return _array(terms, found.shape)
