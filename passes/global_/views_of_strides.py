"""Ops that address memory become views, where they address all of a contiguous tensor in its order.

    as_strided(x, [8, 4, 1], [4, 1, 1]) of [8, 4]          →  view(x, [8, 4, 1])
    as_strided_scatter(x, y, [8, 4], [4, 1]) of [32]       →  view(y, [32])
    copy(x, y) of one shape                                →  y

Adaptive pooling to one position, and the backward of a squeeze in place, leave them. A part of a tensor has other strides than the
whole, so what stays `as_strided` is not split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

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
            if found is not None and _strides(found.meta["val"]) == _strides(node.meta["val"]):
                replace(node, found)
        program.graph.eliminate_dead_code()
        return program


def _strides(value: torch.Tensor) -> list[int]:
    """Those that address anything: a dim of size 1 may have any."""
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]


def _is_all_of(whole: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> bool:
    """Whether `size` and `stride` address every element of `whole`, in order."""
    expected = list(torch.empty(tuple(size), device="meta").stride())
    addresses = [(n, at) for n, at in zip(size, stride, strict=True) if n != 1] == [
        (n, at) for n, at in zip(size, expected, strict=True) if n != 1
    ]
    return addresses and whole.is_contiguous() and not offset and math.prod(size) == whole.numel()


def _view(emit: Emitter, node: Node) -> Node | None:
    x, size, stride, *offset = _arguments(node)
    whole = _is_all_of(x.meta["val"], size, stride, offset[0] if offset else None)
    return emit.call(aten.view.default, x, list(size)) if whole else None


def _written(emit: Emitter, node: Node) -> Node | None:
    x, part, size, stride, *offset = _arguments(node)
    value = x.meta["val"]
    if not _is_all_of(value, size, stride, offset[0] if offset else None) or part.meta["val"].dtype != value.dtype:
        return None
    return emit.call(aten.reshape.default, part, list(value.shape))


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
