"""Ops that address memory become views, where they address all of it; others address it where it lies in order.

    as_strided(x, [8, 4, 1], [4, 1, 1]) of [8, 4]          →  view(x, [8, 4, 1])
    as_strided(x, [4, 8], [1, 4]) of [8, 4]                →  permute(view(x, [8, 4]), [1, 0])
    as_strided(x.t(), [2, 4], [4, 1])                      →  as_strided(x, [2, 4], [4, 1])
    as_strided_scatter(x, y, [8, 4], [4, 1]) of [32]       →  view(y, [32])
    copy(x, y) of one shape                                →  y

Adaptive pooling to one position, and the backward of a squeeze in place, leave them. A part of a tensor has other strides than the
whole, so what stays `as_strided` is not split; and a tensor that ranks have put together lies in order, whatever lay there before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import OpOverload, gives_views
from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, replace
from autopar.ir.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class ViewsOfStrides:
    """Rewrite as_strided, as_strided_scatter and copy into views and operands.

    Reads: val. Writes: val, PHASE, SOURCE of new nodes.
    Ensures: values and dtypes are unchanged, and so are the strides of dims longer than 1.
    """

    name: str = "views of strides"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        for node in list(program.graph.nodes):
            rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
            found = rewrite(Emitter(program.graph, before=node), node) if rewrite else None
            if found is not None and _kind(found.meta["val"]) == _kind(node.meta["val"]):
                replace(node, found)
        remove_dead_code(program.graph)
        return program


def _kind(value: torch.Tensor) -> tuple[torch.dtype, list[int]]:
    """With the strides that address anything: a dim of size 1 may have any."""
    return value.dtype, [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]


def _view(emit: Emitter, node: Node) -> Node | None:
    x, size, stride, *offset = _arguments(node)
    begin = x.meta["val"].storage_offset() if not offset or offset[0] is None else offset[0]
    memory = _in_order(emit, x)
    if memory is None:
        return None
    order = _order_of_all(memory.meta["val"].numel(), size, stride) if not begin else None
    if order is None:
        is_there = memory is x and begin == x.meta["val"].storage_offset()
        return None if is_there else emit.call(aten.as_strided.default, memory, list(size), list(stride), begin)
    view = emit.call(aten.view.default, memory, [size[dim] for dim in order])
    return _permuted(emit, view, [order.index(dim) for dim in range(len(order))])


def _written(emit: Emitter, node: Node) -> Node | None:
    x, part, size, stride, *offset = _arguments(node)
    value = x.meta["val"]
    is_memory = value.is_contiguous() and _order_of_memory(value) is not None and not (offset and offset[0])
    order = _order_of_all(value.numel(), size, stride) if is_memory else None
    if order is None or part.meta["val"].dtype != value.dtype:
        return None
    return emit.call(aten.reshape.default, _permuted(emit, part, order), list(value.shape))


def _order_of_all(number: int, size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The dims of `size` in the order in which `number` elements lie, one behind the other, if these strides address each once."""
    long = [dim for dim in range(len(size)) if size[dim] != 1]
    order = sorted(long, key=lambda dim: -stride[dim])
    expected = torch.empty([size[dim] for dim in order], device="meta").stride()
    if math.prod(size) != number or [stride[dim] for dim in order] != list(expected):
        return None
    return list(range(len(size))) if order == long else [*order, *(dim for dim in range(len(size)) if size[dim] == 1)]


def _in_order(emit: Emitter, x: Node) -> Node | None:
    """All of the memory that `x` shows a part of, or in another order, from its begin; None where nothing shows it."""
    while (order := _order_of_memory(x.meta["val"])) is None:
        op = x.all_input_nodes[0] if x.target is operator.getitem else x  # a part of a split
        if not isinstance(op.target, OpOverload) or not gives_views(op.target):
            return None
        viewed = op.all_input_nodes[0]
        if viewed.meta["val"].dtype != x.meta["val"].dtype:
            return None  # strides and offsets count other elements there
        x = viewed
    return _permuted(emit, x, order)


def _order_of_memory(value: torch.Tensor) -> list[int] | None:
    """The dims in the order in which they lie in memory, where `value` is all of it."""
    if value.storage_offset() or value.untyped_storage().nbytes() != value.numel() * value.element_size():
        return None
    return _order_of_all(value.numel(), value.shape, value.stride())


def _permuted(emit: Emitter, value: Node, order: Sequence[int]) -> Node:
    return value if list(order) == list(range(len(order))) else emit.call(aten.permute.default, value, list(order))


def _copied(emit: Emitter, node: Node) -> Node | None:
    into, value = _arguments(node)[:2]
    same = isinstance(value, Node) and (into.meta["val"].shape, into.meta["val"].dtype) == (
        value.meta["val"].shape,
        value.meta["val"].dtype,
    )
    return value if same else None


def _arguments(node: Node) -> tuple[Any, ...]:
    return tuple(node.args)


_REWRITES: dict[Any, Callable[[Emitter, Node], Node | None]] = {
    aten.as_strided.default: _view,
    aten.as_strided_scatter.default: _written,
    aten.copy.default: _copied,
}
