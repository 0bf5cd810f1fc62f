"""What is written where a mask says so becomes a choice of each position by itself, which is split like any other.

    x[mask] = values        x = where(mask, values, x)                 x[:, mask] likewise
    …, accumulate=True      x = x + where(mask, values, 0)

That is where each position gets the same values (mask tokens, zeros); values of their own for each true position stay one op. As one op
the backward of `values` asks for the positions, whose number depends on data, and no graph has that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, lay_out_anew, replace, tensor_of
from autopar.ir.arguments import all_named
from autopar.ir.program import Program

aten = torch.ops.aten

_IN_PLACE = (aten.index_put_.default,)
_WRITES = (aten.index_put.default, *_IN_PLACE)


@dataclass(frozen=True)
class DecomposeMaskedWrites:
    """Writes to the true positions of one boolean mask.

    Reads: a FORWARD program.
    Writes: `aten.where` in the place of `aten.index_put`, copied into what that overwrites.
    Ensures: the result has the values, shape and dtype of torch's.
    """

    name: str = "decompose masked writes"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        for node in list(program.graph.nodes):
            if node.target in _WRITES:
                _decompose(node, **all_named(node))
        return program


def _decompose(node: Node, self: Node, indices: list[Node | None], values: Node, accumulate: bool) -> None:
    front = next((number for number, each in enumerate(indices) if each is not None), len(indices))
    mask, *others = indices[front:] or [None]
    if mask is None or any(each is not None for each in others) or tensor_of(mask).dtype != torch.bool or not tensor_of(mask).ndim:
        return
    masked = tensor_of(mask).ndim
    behind = tensor_of(self).ndim - front - masked
    own = tensor_of(values).ndim - behind - 1  # the dim of `values` that the true positions are counted along, if it has one
    if own >= 0 and tensor_of(values).shape[own] != 1:
        return
    emit = Emitter(node.graph, before=node)
    for _ in range(masked - 1 if own >= 0 else 0):
        values = emit.call(aten.unsqueeze.default, values, own)
    for _ in range(behind):
        mask = emit.call(aten.unsqueeze.default, mask, -1)
    written = _written(emit, self, mask, values, accumulate)
    result = emit.call(aten.copy_.default, self, written) if node.target in _IN_PLACE else written
    strides = tensor_of(node).stride()
    replace(node, result)
    if tensor_of(result).stride() != strides:
        lay_out_anew(result)


def _written(emit: Emitter, value: Any, mask: Node, values: Node, accumulate: bool) -> Node:
    if not accumulate:
        return emit.call(aten.where.self, mask, values, value)
    return emit.call(aten.add.Tensor, value, emit.call(aten.where.ScalarOther, mask, values, 0))
