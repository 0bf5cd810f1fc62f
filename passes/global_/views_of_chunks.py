"""Equal chunks become views: what splits a dim into equal parts reads better to a sharder as a new dim.

    split(x, 4, dim=1) of [8, 12]     →  view [8, 3, 4], then select(1, i) for part i
    slice(x, 1, 4, 8) of [8, 12]      →  view [8, 3, 4], then select(1, 1)
    slice_backward(g, [8, 12], 1, 4, 8)  →  select_backward(g, [8, 3, 4], 1, 1), then view [8, 12]
    cat([a, b, c], 1) of [8, 4] each  →  cat of [8, 1, 4] along dim 1, then view [8, 12]

The chunk's own dim can then be split over ranks; only the small dim that counts chunks cannot.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter
from autopar.ir.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class ViewsOfChunks:
    """Rewrite equal-chunk split, slice, slice_backward and cat into views and selects.

    Reads: val. Writes: val, PHASE, SOURCE of new nodes. Ensures: no split of equal chunks, and no
    slice or cat of equal chunks, is left; values are unchanged.
    """

    name: str = "views of chunks"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        for node in list(program.graph.nodes):
            rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
            emit = Emitter(program.graph, node)
            replacement = rewrite(emit, node) if rewrite else None
            if replacement is not None and node.users:
                replacement = _laid_out_like(emit, node, replacement)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                program.graph.erase_node(node)
        remove_dead_code(program.graph)
        return program


def _laid_out_like(emit: Emitter, node: Node, replacement: Node) -> Node | None:
    """`replacement` with the strides of `node`, on which those of a convolution's result depend; None where no copy has them."""
    wanted, found = node.meta["val"], replacement.meta["val"]
    if wanted.stride() == found.stride():
        return replacement
    order = sorted(range(wanted.ndim), key=lambda dim: -wanted.stride(dim))
    copy = emit.call(aten.clone.default, emit.call(aten.permute.default, replacement, order), memory_format=torch.contiguous_format)
    back = emit.call(aten.permute.default, copy, [order.index(dim) for dim in range(wanted.ndim)])
    return back if back.meta["val"].stride() == wanted.stride() else None


def _shape(node: Node) -> list[int]:
    return list(node.meta["val"].shape)


def _argument(node: Node, position: int, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else default


def _chunked(shape: list[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :]]


def _chunk(emit: Emitter, x: Any, dim: int, size: int, index: int) -> Node:
    chunks = emit.call(aten.reshape.default, x, _chunked(_shape(x), dim, size))
    return emit.call(aten.select.int, chunks, dim, index)


def _split(emit: Emitter, node: Node) -> Node | None:
    """All parts share one view; the getitems of the split are replaced one by one."""
    x, sizes, dim = _argument(node, 0, None), _argument(node, 1, None), _argument(node, 2, 0)
    assert isinstance(x, Node)
    length, dim = _shape(x)[dim], dim % len(_shape(x))
    if isinstance(sizes, (list, tuple)):
        if len(set(sizes)) > 1:
            return None
        sizes = sizes[0]
    sizes = min(sizes, max(length, 1))  # one part may be asked to be longer than all
    if length % sizes:
        return None
    chunks = emit.call(aten.reshape.default, x, _chunked(_shape(x), dim, sizes))
    for user in list(node.users):
        assert user.target is operator.getitem
        part = Emitter(emit.graph, user).call(aten.select.int, chunks, dim, user.args[1])
        user.replace_all_uses_with(part)
        emit.graph.erase_node(user)
    return chunks


def _bounds(length: int, start: int | None, end: int | None) -> tuple[int, int]:
    return slice(start, end).indices(length)[:2]


def _is_chunk(length: int, start: int, end: int, step: int) -> bool:
    size = end - start
    return step == 1 and 0 < size < length and length % size == 0 and start % size == 0


def _slice(emit: Emitter, node: Node) -> Node | None:
    x, dim = _argument(node, 0, None), _argument(node, 1, 0)
    length, dim = _shape(x)[dim], dim % len(_shape(x))
    start, end = _bounds(length, _argument(node, 2, None), _argument(node, 3, None))
    if not _is_chunk(length, start, end, _argument(node, 4, 1)):
        return None
    return _chunk(emit, x, dim, end - start, start // (end - start))


def _slice_backward(emit: Emitter, node: Node) -> Node | None:
    arguments: Any = node.args
    gradient, shape, dim, start, end, step = arguments
    dim = dim % len(shape)
    start, end = _bounds(shape[dim], start, end)
    if not _is_chunk(shape[dim], start, end, step):
        return None
    size = end - start
    spread = emit.call(aten.select_backward.default, gradient, _chunked(list(shape), dim, size), dim, start // size)
    return emit.call(aten.view.default, spread, list(shape))


def _cat(emit: Emitter, node: Node) -> Node | None:
    parts, dim = list(_argument(node, 0, ())), _argument(node, 1, 0)
    shapes = [_shape(part) for part in parts]
    dim = dim % len(shapes[0])
    if len(parts) < 2 or any(shape != shapes[0] for shape in shapes) or shapes[0][dim] == 1:
        return None
    stacked = emit.call(aten.cat.default, [emit.call(aten.unsqueeze.default, part, dim) for part in parts], dim)
    return emit.call(aten.view.default, stacked, _shape(node))


_REWRITES = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unsafe_split.Tensor: _split,  # of recurrent cells without gradients
    aten.unsafe_split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.cat.default: _cat,
}
