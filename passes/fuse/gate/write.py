"""`autopar.gated` and `autopar.bias_activation` in the place of what was matched."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, lay_out_anew, replace, tensor_of
from autopar.kernels.gated import bias_activation, gated
from autopar.passes.fuse.gate.bias import Biased
from autopar.passes.fuse.gate.match import Gate

aten = torch.ops.aten


def write_gate(found: Gate) -> None:
    """Replace the gate's root by the op, and erase what only led to it."""
    emit = Emitter(found.root.graph, before=found.root)
    gate, up = _halves(emit, found.gate, found.halves) if found.halves is not None else (found.gate, found.up)
    out = emit.call(gated, emit.cast(gate, found.dtype), emit.cast(up, found.dtype), activation=found.kind)
    if found.number != 1.0:
        out = emit.call(aten.mul.Tensor, out, found.number)
    _finish(emit, found.root, out, found.interior)


def write_bias(found: Biased) -> None:
    """Replace the activation by the op, and erase what only led to it."""
    emit = Emitter(found.root.graph, before=found.root)
    x, bias = emit.cast(found.x, found.dtype), emit.cast(found.bias, found.dtype)
    if tensor_of(bias).dim() != 1:
        bias = emit.call(aten.reshape.default, bias, [tensor_of(bias).numel()])
    _finish(emit, found.root, emit.call(bias_activation, x, bias, activation=found.kind), found.interior)


def _halves(emit: Emitter, whole: Node, dim: int) -> tuple[Node, Node]:
    middle = tensor_of(whole).shape[dim] // 2
    up = emit.call(aten.slice.Tensor, whole, dim, 0, middle)
    return emit.call(aten.slice.Tensor, whole, dim, middle, 2 * middle), up


def _finish(emit: Emitter, root: Node, out: Node, interior: frozenset[Node]) -> None:
    out = emit.cast(out, tensor_of(root).dtype)
    replace(root, out)
    for node in sorted(interior, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
    lay_out_anew(out)
