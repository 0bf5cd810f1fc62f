"""`autopar.norm`, or `autopar.add_norm`, in the place of what was matched."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, lay_out_anew, replace, tensor_of
from autopar.kernels.normalisation import add_norm, norm
from autopar.passes.fuse.norm.match import Match
from autopar.passes.fuse.norm.residual import Residual

aten = torch.ops.aten


def write(found: Match, residual: Residual | None) -> None:
    """Replace the match's end by the op, and the sum inside it by the op's; erase what only led to them."""
    emit = Emitter(found.end.graph, found.end if residual is None else residual.before, like=found.end)
    columns = tensor_of(found.x).shape[-1]
    weight, bias = (None if item is None else _row(emit, item, columns) for item in (found.weight, found.bias))
    options = {"eps": found.eps, "centred": found.centred}
    if residual is None:
        result = emit.call(norm, emit.cast(found.x, found.dtype), weight, bias, **options)
    else:
        result = emit.call(add_norm, residual.left, residual.right, weight, bias, **options)
    out = emit.cast(emit.call(operator.getitem, result, 0), tensor_of(found.end).dtype)
    if residual is not None:
        total = Emitter(emit.graph, residual.before, like=residual.total).call(operator.getitem, result, 1)
        _stand_in(residual.total, total)
    _stand_in(found.end, out)
    for node in sorted(found.interior - {found.x}, reverse=True):
        if not node.users:
            node.graph.erase_node(node)


def _row(emit: Emitter, item: Node, columns: int) -> Node:
    """A weight or bias as [N]."""
    return item if tensor_of(item).dim() == 1 else emit.call(aten.reshape.default, item, [columns])


def _stand_in(node: Node, by: Node) -> None:
    strides = tensor_of(node).stride()
    replace(node, by)
    if tensor_of(by).stride() != strides:
        lay_out_anew(by)
