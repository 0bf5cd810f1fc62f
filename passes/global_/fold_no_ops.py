"""Calls that change nothing disappear, and so does a `cat` of one; an index by a full range becomes a view; what is undone again is not
done: transposes, dims kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, tensor_of
from autopar.ir.keys import PHASE, STAGE
from autopar.ir.program import Program
from autopar.ops.traits import PERMUTES, permutation

aten = torch.ops.aten


@dataclass(frozen=True)
class FoldNoOps:
    """Remove aliases, copies and arithmetic that change nothing; read indexing by a full range as the view it is.

    Hugging Face masks index with `arange`s that select everything in order: as a view they can be split. A bias's gradient is a sum that
    keeps a dim of 1 and a view without it: as one call nothing stands between what is reduced over ranks and its reader.
    Reads: val. Writes: nothing on kept nodes. Ensures: values, dtypes and strides are unchanged.
    """

    name: str = "fold no-ops"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        for node in list(program.graph.nodes):
            if node.op != "call_function":
                continue
            rewrite = _REWRITES.get(node.target)
            replacement = _unchanged_operand(node) or (rewrite(program, node) if rewrite is not None else None)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                program.graph.erase_node(node)
        remove_dead_code(program.graph)
        return program


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def _unchanged_operand(node: Node) -> Node | None:
    """The operand that `node` hands on unchanged, if it does."""
    test = _NO_OPS.get(node.target)
    # What `copy` writes is its second argument; the first gives shape, dtype and layout.
    position = 1 if node.target == aten.copy.default else 0
    operand = node.args[position] if len(node.args) > position else None
    if test is None or not isinstance(operand, Node) or not test(node):
        return None
    return operand if _same(operand.meta["val"], node.meta["val"]) else None


def _literal_is(*values: float) -> Callable[[Node], bool]:
    """Whether the second operand is one of `values`, of the sign that it has there, and what is computed are no complex numbers:
    their products with 1 are not themselves where they are infinite."""

    def test(node: Node) -> bool:
        literal = node.args[1]
        is_one = isinstance(literal, (int, float)) and any(literal == value and _sign(literal) == _sign(value) for value in values)
        return is_one and not node.kwargs and not node.meta["val"].is_complex()

    return test


def _sign(value: float) -> float:
    return math.copysign(1.0, value)


def _adds_nothing(node: Node) -> bool:
    """−0.0 + 0.0 is 0.0, so of floats −0.0 alone adds nothing; of integers 0 does."""
    return _literal_is(-0.0)(node) or (not node.meta["val"].is_floating_point() and _literal_is(0)(node))


def _always(_: Node) -> bool:
    return True


_NO_OPS: dict[Any, Callable[[Node], bool]] = {
    aten.detach.default: _always,
    aten.alias.default: _always,
    aten.clone.default: _always,
    aten.copy.default: _always,
    aten.lift_fresh_copy.default: _always,
    aten._to_copy.default: _always,
    aten.expand.default: _always,
    aten.view.default: _always,
    aten._unsafe_view.default: _always,
    aten.reshape.default: _always,
    aten.slice.Tensor: _always,
    aten.add.Tensor: _adds_nothing,
    aten.sub.Tensor: _literal_is(0),
    aten.mul.Tensor: _literal_is(1),
    aten.div.Tensor: _literal_is(1),
}


def _iota_dim(node: Node) -> int | None:
    """The dim along which `node` counts 0, 1, 2, … while it is 1 long elsewhere; None when it does not."""
    shape = tuple(node.meta["val"].shape)
    long = [dim for dim, size in enumerate(shape) if size > 1]
    if len(long) != 1:
        return None
    origin: Any = node
    while origin.target in _KEEP_ORDER:
        if tuple(size for size in origin.meta["val"].shape if size > 1) != (shape[long[0]],):
            return None
        origin = origin.args[0]
    counts = origin.target == aten.arange.default or (origin.target in (aten.arange.start, aten.arange.start_step) and origin.args[0] == 0)
    one_apart = origin.target != aten.arange.start_step or len(origin.args) < 3 or origin.args[2] == 1
    return long[0] if counts and one_apart and origin.meta["val"].numel() == shape[long[0]] else None


_KEEP_ORDER = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten._to_copy.default,
)


def _index_as_view(program: Program, node: Node) -> Node | None:
    """`x[arange(n)[:, None], arange(m)[None, :]]` of x [n, m] is x itself, in the shape of the result."""
    x, indices = node.args[0], node.args[1]
    assert isinstance(x, Node) and isinstance(indices, (list, tuple))
    shape, result = tuple(x.meta["val"].shape), tuple(node.meta["val"].shape)
    if len(indices) > len(shape) or not all(isinstance(index, Node) for index in indices):
        return None
    rank = max(tensor_of(index).ndim for index in indices)
    places = []
    for dim, index in enumerate(indices):
        assert isinstance(index, Node)
        place = _iota_dim(index)
        if place is None or index.meta["val"].shape[place] != shape[dim]:
            return None
        places.append(place + rank - index.meta["val"].ndim)
    if places != sorted(set(places)) or result[rank:] != shape[len(indices) :]:
        return None
    return Emitter(program.graph, node).call(aten.reshape.default, x, list(result))


def _sum_without_dims(program: Program, node: Node) -> Node | None:
    """`view(sum(x, dims, keepdim=True), shape)` as `sum(x, dims)`, where that has this shape."""
    kept = node.args[0]
    if not isinstance(kept, Node) or kept.target != aten.sum.dim_IntList or len(kept.users) > 1:
        return None
    if (PHASE.get(kept), STAGE.get(kept)) != (PHASE.get(node), STAGE.get(node)):
        return None  # where only the sum goes from one to the other, x would have to
    x, dims, *keeps = kept.args
    if keeps != [True]:
        return None
    found = Emitter(program.graph, kept, like=node).call(aten.sum.dim_IntList, x, dims, **kept.kwargs)
    if _same(found.meta["val"], node.meta["val"]):
        return found
    program.graph.erase_node(found)
    return None


def _of_one_part(program: Program, node: Node) -> Node | None:
    """`cat([x])` is x, or a copy of x that lies as a `cat` does, through which samples merged with another dim can be followed."""
    parts = node.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 1:
        return None
    (part,) = parts
    assert isinstance(part, Node)
    if _same(tensor_of(part), tensor_of(node)):
        return part
    copied = Emitter(program.graph, node).call(aten.clone.default, part, memory_format=torch.contiguous_format)
    if _same(tensor_of(copied), tensor_of(node)):
        return copied
    program.graph.erase_node(copied)
    return None


def _turned_back(program: Program, node: Node) -> Node | None:
    """What a transpose shows in the order in which it lies: where it moves no dim, or the transpose below it moved them."""
    below = node.args[0]
    assert isinstance(below, Node)
    order = list(range(below.meta["val"].ndim))
    if list(permutation(node)) == order:
        return below
    if below.target not in PERMUTES or [permutation(below)[dim] for dim in permutation(node)] != order:
        return None
    source = below.args[0]
    assert isinstance(source, Node)
    return source


_REWRITES: dict[Any, Callable[[Program, Node], Node | None]] = {
    **dict.fromkeys(PERMUTES, _turned_back),
    aten.index.Tensor: _index_as_view,
    aten.cat.default: _of_one_part,
    aten.view.default: _sum_without_dims,
    aten._unsafe_view.default: _sum_without_dims,
    aten.reshape.default: _sum_without_dims,
}
