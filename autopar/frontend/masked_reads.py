"""Reads by a boolean mask that one assignment takes up again under the same mask, whose size is nobody's matter.

    x[mask] += w             x = where(mask, where(mask, x, 0) + where(mask, w, 0), x)
    y[mask] = x[mask]        y = where(mask, where(mask, x, 0), y)

`x[mask]` has as many rows as values say, and so has all that is made of it. Here each has all positions. Where the mask is false it holds
numbers that nobody reads, made of zeros: neither they nor their gradients get out, since every way into what is computed there, and the
one out of it, leads through a choice by the mask. That is right of ops that go position by position, and only those are taken. Whatever
else is made of a size that depends on values is refused, as early as the model runs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import SymBool, SymInt
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar._torch import OpOverload, pytree
from autopar.errors import CaptureError
from autopar.graph.autocast import Region
from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import memory_of, writers_of, writes, written_by
from autopar.ir.arguments import all_named, arguments, call_of
from autopar.ir.source import WRAPPED, source_of

aten = torch.ops.aten

_WRITES = (aten.index_put.default, aten.index_put_.default)
_COPIES = (
    aten._to_copy.default, aten.alias.default, aten.clone.default, aten.detach.default, aten.to.dtype, aten.to.dtype_layout, aten.to.other,
    aten.type_as.default,
)  # fmt: skip
# In whose tags torch forgot that they go position by position.
_OF_POSITIONS = {
    overload for packet in (aten.__and__, aten.__or__, aten.__rshift__, aten.__iand__, aten.__ior__, aten.__irshift__)
    for overload in (packet.Scalar, packet.Tensor)
}  # fmt: skip
# Of whole numbers these fail at a zero, which is what stands where the mask is false.
_DIVIDE = ("remainder", "fmod", "_mode")


def takes_up(op: OpOverload) -> bool:
    """Whether `op` may have values of the true positions of a mask as an operand: it goes position by position, or puts them back."""
    if op in _WRITES or op in _COPIES or op in _OF_POSITIONS:
        return True
    is_of_positions = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return is_of_positions and not any(name in str(op) for name in _DIVIDE)


def masked_reads_spread(graph: Graph, regions: dict[Node, Region]) -> None:
    """Let what is read by a mask, and written under that mask, have all positions in a graph whose nodes have torch's own fake values.

    What is new is in the regions of what it stands for. Raises `CaptureError` where another result is of a size that depends on values.
    """
    if any(_is_open(node) for node in graph.nodes):
        _Spreading(graph, regions).run()
        _drop_open(graph)


@dataclass(frozen=True)
class _Spread:
    """All positions in the place of the true ones of `mask`, with `behind` dims of their own; the first was read by `since`."""

    value: Node
    mask: Node
    behind: int
    since: Node


class _Spreading:
    def __init__(self, graph: Graph, regions: dict[Node, Region]) -> None:
        self._graph, self._regions = graph, regions
        self._spread: dict[Node, _Spread] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.target is aten.index.Tensor:
                self._read(node, *arguments(node))
            elif node.target in _WRITES:
                named = all_named(node)
                self._write(node, named["self"], named["indices"], named["values"], named["accumulate"])
            elif isinstance(node.target, OpOverload) and takes_up(node.target):
                self._compute(node)

    def _read(self, node: Node, read: Node, indices: list[Node | None]) -> None:
        mask, behind = _mask(read, indices)
        if mask is not None:
            self._spread[node] = _Spread(self._chosen(node, mask, behind, read), mask, behind, node)

    def _compute(self, node: Node) -> None:
        spread = {each: self._spread[each] for each in node.all_input_nodes if each in self._spread}
        if not spread or (writes(node) and written_by(node) not in spread):
            return
        first = replace(next(iter(spread.values())), since=min(each.since for each in spread.values()))
        # What has no dims is promoted to what those have that do; the condition of a `where` is a bool, which promotes nothing.
        values = (each.meta.get("val") for each in node.all_input_nodes)
        dtype = reduce(torch.promote_types, [each.dtype for each in values if isinstance(each, torch.Tensor) and each.ndim])
        found = {
            each: self._taken_up(node, each, first) if each in spread else self._beside(node, each, first, dtype)
            for each in node.all_input_nodes
        }
        if None not in found.values():
            args, kwargs = map_arg((node.args, dict(node.kwargs)), found.__getitem__)
            self._spread[node] = replace(first, value=self._call(node, call_of(node), *args, **kwargs))

    def _taken_up(self, node: Node, operand: Node, like: _Spread) -> Node | None:
        """An operand of `node` that is spread; None where it is so by another mask than `like`."""
        each = self._spread[operand]
        is_alike = each.behind == like.behind and self._is_same(each.mask, like.mask, like.since, node)
        return each.value if is_alike else None

    def _beside(self, node: Node, operand: Node, like: _Spread, dtype: torch.dtype) -> Node | None:
        """Another operand of `node`, of which each true position gets the same, chosen as what is spread is, which has `dtype`; None where
        each gets its own."""
        if _is_open(operand) or not isinstance(operand.meta.get("val"), torch.Tensor):
            return None
        tensor, value = tensor_of(operand), operand
        own = tensor.ndim - like.behind - 1
        if own >= 0:  # it has a dim along which true positions are counted
            if tensor.shape[own] != 1:
                return None
            for _ in range(tensor_of(like.mask).ndim - 1):
                value = self._call(node, aten.unsqueeze.default, value, own)
        if not tensor.ndim:  # with dims it would make the result as wide as itself
            wanted = torch.result_type(torch.empty(1, dtype=dtype, device="meta"), torch.empty((), dtype=tensor.dtype, device="meta"))
            value = self._call(node, aten._to_copy.default, value, dtype=wanted)
        return self._chosen(node, like.mask, like.behind, value, tensor.dtype)

    def _write(self, node: Node, target: Node, indices: list[Node | None], values: Node, accumulate: bool) -> None:
        spread, (mask, behind) = self._spread.get(values), _mask(target, indices)
        if spread is None or mask is None or behind != spread.behind or not self._is_same(mask, spread.mask, spread.since, node):
            return
        dtype = tensor_of(target).dtype
        if dtype not in (tensor_of(values).dtype, tensor_of(node).dtype):
            return
        if accumulate:
            written = self._call(node, aten.add.Tensor, target, self._chosen(node, mask, behind, spread.value, dtype))
        else:
            written = self._call(node, aten.where.self, self._shown(node, mask, behind), spread.value, target)
        target = target if writes(node) else self._call(node, aten.clone.default, target)
        result = self._call(node, aten.copy_.default, target, written)
        result.meta["val"] = tensor_of(node)
        node.replace_all_uses_with(result)
        self._graph.erase_node(node)

    def _chosen(self, node: Node, mask: Node, behind: int, value: Node, dtype: torch.dtype | None = None) -> Node:
        """`value` where the mask is true, zeros elsewhere."""
        zero = False if (dtype or tensor_of(value).dtype) == torch.bool else 0
        return self._call(node, aten.where.ScalarOther, self._shown(node, mask, behind), value, zero)

    def _shown(self, node: Node, mask: Node, behind: int) -> Node:
        for _ in range(behind):
            mask = self._call(node, aten.unsqueeze.default, mask, -1)
        return mask

    def _is_same(self, one: Node, two: Node, since: Node, until: Node) -> bool:
        """Whether two masks are one, which is not written from `since` to `until`, or are made alike (`labels == 0` twice)."""
        one, two = _undetached(one), _undetached(two)
        if one is two:
            return self._stays(one, since, until)
        if not (_is_pure(one) and _is_pure(two) and one.target == two.target):
            return False
        operands, structure = pytree.tree_flatten((one.args, one.kwargs))
        others, other_structure = pytree.tree_flatten((two.args, two.kwargs))
        first, last = min(one, two), max(one, two)
        return (
            structure == other_structure
            and all(self._stays(each, each, until) for each in (one, two))
            and all(
                self._is_same(mine, other, first, last) if isinstance(mine, Node) and isinstance(other, Node) else mine == other
                for mine, other in zip(operands, others, strict=True)
            )
        )

    def _stays(self, value: Node, since: Node, until: Node) -> bool:
        """Whether nothing between two nodes writes into the memory of `value`."""
        memory = memory_of(value)
        return not any(since < writer < until and memory_of(written_by(writer)) is memory for writer in writers_of(self._graph))

    def _call(self, like: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self._graph.inserting_before(like):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key != "val"}
        if like in self._regions:
            self._regions[node] = self._regions[like]
        return node


def _mask(value: Node, indices: list[Node | None]) -> tuple[Node | None, int]:
    """The one mask among `indices` of `value`, and how many dims are behind those that it covers; None where something else chooses."""
    given = [(dim, each) for dim, each in enumerate(indices) if each is not None]
    if len(given) != 1 or _is_open(value) or _is_open(given[0][1]):
        return None, 0
    ((front, mask),) = given
    mask = _undetached(mask)
    tensor = tensor_of(mask)
    return (mask, tensor_of(value).ndim - front - tensor.ndim) if tensor.dtype == torch.bool and tensor.ndim else (None, 0)


def _undetached(node: Node) -> Node:
    """What `torch.no_grad()` takes in, which is another name of the same numbers."""
    while node.target in (aten.detach.default, aten.alias.default):
        node = node.all_input_nodes[0]
    return node


def _is_pure(node: Node) -> bool:
    """Whether a call gives the same for the same operands, its own."""
    if not isinstance(node.target, OpOverload) or writes(node):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_open(node: Node) -> bool:
    """Whether a size of `node`, or what it is, depends on values."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    sizes = [size for leaf in leaves for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
    return any(isinstance(size, (SymInt, SymBool)) for size in sizes)


def _drop_open(graph: Graph) -> None:
    """Nobody reads them but each other; else `CaptureError`."""
    for node in reversed(graph.nodes):
        if _is_open(node) and not node.users:
            graph.erase_node(node)
    left = next((node for node in graph.nodes if _is_open(node)), None)
    if left is not None:
        raise CaptureError(
            "forward cannot be captured as one graph: the size of a result depends on values (x[mask] is read, and more becomes of it than "
            f"what one assignment under the same mask writes)\n  where: {source_of(left, WRAPPED).at}\n"
            "  how to mend it: make the mask once, for both sides, and write what is computed of each position alone; or keep the shape: "
            "y = torch.where(mask[..., None], x + w, y) for y[mask] = x[mask] + w"
        )
