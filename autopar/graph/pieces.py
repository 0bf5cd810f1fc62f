"""Equal pieces of a value along a part of a dim, and how they go through calls: what a call makes of a piece is a piece of what it makes.

An element lies in the piece (its linear index // stride) % number, where linear indices count a value's elements in row-major order,
whatever its strides. Views that only rename dims leave that number as it is, so that a piece is known through merged and broken dims alike:

    [4, 512, 8192]                 two pieces of 256 of the 512: stride 256 · 8192
    [8, 4, 512, 8192]  gathered    the same stride
    [4, 8, 512, 8192]  permuted    the stride follows the dim
    [16384, 8192]      reshaped    the same stride: of every 512 rows the first and the last 256
    [16384, 3584]      a product   256 · 3584
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, tensor_of
from autopar.ir.arguments import node_at
from autopar.ir.collectives import all_gather, all_reduce, reduce_scatter, wait
from autopar.ir.keys import ORIGIN
from autopar.ops.traits import PERMUTES, permutation

aten = torch.ops.aten

PRODUCT = aten.mm.default
RESHAPES = frozenset((aten.reshape.default, aten.view.default, aten._unsafe_view.default))
# Calls that give a value's elements as they are, in the order that they have.
_SAME = frozenset((aten.clone.default, aten.alias.default, wait, all_gather, all_reduce, reduce_scatter, *RESHAPES))


class Digit(NamedTuple):
    """Which of `number` pieces an element lies in: (linear index // stride) % number."""

    stride: int
    number: int

    def place(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """The dim of a value of `shape` that it is a part of, with how many elements of that dim are outside and inside of it; None where
        it is no part of one dim."""
        inner = 1
        for dim in reversed(range(len(shape))):
            whole, size = self.stride * self.number, inner * shape[dim]
            if self.stride % inner == 0 and size % whole == 0:
                return dim, size // whole, self.stride // inner
            inner = size
        return None

    def piece(self, shape: Sequence[int]) -> list[int]:
        """The shape of a piece of a value of `shape`."""
        place = self.place(shape)
        assert place is not None, f"{self} of {list(shape)}"
        return [size // self.number if dim == place[0] else size for dim, size in enumerate(shape)]


def rearranges(node: Node) -> bool:
    """Whether the elements of `node` are those of its one operand."""
    return node.target in _SAME or node.target in PERMUTES


def after(node: Node, digit: Digit) -> Digit | None:
    """The pieces of `node` that it makes of the pieces `digit` of its first operand; None where they are none."""
    given, made = shape_at(node_at(node, 0)), shape_at(node)
    if node.target in PERMUTES:
        found = _moved(digit, given, permutation(node))
    elif node.target is PRODUCT:
        found = _of_rows(digit, given, made)
    else:
        found = digit if rearranges(node) else None
    return found if found is not None and found.place(made) is not None else None


def before(node: Node, digit: Digit) -> Digit | None:
    """The pieces of the operands of `node`, of a product those of its first, of which it makes the pieces `digit` of itself."""
    given, made = shape_at(node_at(node, 0)), shape_at(node)
    if node.target in PERMUTES:
        order = permutation(node)
        found = _moved(digit, made, [order.index(dim) for dim in range(len(order))])
    elif node.target is PRODUCT:
        found = _of_rows(digit, made, given)
    else:
        found = digit
    return found if found is not None and found.place(given) is not None else None


def cut(emit: Emitter, value: Node, digit: Digit) -> list[Node]:
    """The pieces of `value`, in order; views where its strides allow it."""
    shape = shape_at(value)
    place = digit.place(shape)
    assert place is not None, f"{digit} of {value}: {shape}"
    dim, outer, inner = place
    broken = emit.call(aten.reshape.default, value, [*shape[:dim], outer, digit.number, inner, *shape[dim + 1 :]])
    entries = [emit.call(aten.select.int, broken, dim + 1, number) for number in range(digit.number)]
    return [emit.call(aten.reshape.default, each, digit.piece(shape)) for each in entries]


def joined(emit: Emitter, pieces: Sequence[Node], digit: Digit, shape: Sequence[int]) -> Node:
    """The value of `shape` that `pieces` are the pieces of, in new memory."""
    place = digit.place(shape)
    assert place is not None, f"{digit} of {shape}"
    dim, outer, inner = place
    if outer == 1:
        return emit.call(aten.cat.default, list(pieces), dim)
    apart = [*shape[:dim], outer, inner, *shape[dim + 1 :]]
    parts = [emit.call(aten.reshape.default, each, apart) for each in pieces]
    return emit.call(aten.reshape.default, emit.call(aten.cat.default, parts, dim + 1), shape)


def piece_of(emit: Emitter, node: Node, operands: Sequence[Node], digit: Digit) -> Node:
    """What `node` makes of `operands`, pieces of its own; `digit` is of its value."""
    if node.target in RESHAPES:
        return emit.call(aten.reshape.default, operands[0], digit.piece(shape_at(node)))
    if node.target is aten.clone.default and node not in ORIGIN and tensor_of(operands[0]).is_contiguous():
        return operands[0]  # it was there for a layout that a piece has already
    return emit.call(node.target, *operands, *node.args[len(operands) :], **node.kwargs)


def contiguous(emit: Emitter, value: Node) -> Node:
    return value if tensor_of(value).is_contiguous() else emit.call(aten.clone.default, value, memory_format=torch.contiguous_format)


def shape_at(node: Node) -> list[int]:
    return list(map(int, tensor_of(node).shape))


def _moved(digit: Digit, shape: Sequence[int], permutation: Sequence[int]) -> Digit | None:
    """The same pieces of a value of `shape` once its dims are in another order."""
    place = digit.place(shape)
    if place is None:
        return None
    inside = permutation[permutation.index(place[0]) + 1 :]
    return Digit(place[2] * math.prod(shape[dim] for dim in inside), digit.number)


def _of_rows(digit: Digit, shape: Sequence[int], other: Sequence[int]) -> Digit | None:
    """The same rows of another matrix."""
    place = digit.place(shape)
    return Digit(place[2] * other[1], digit.number) if place is not None and place[0] == 0 else None
