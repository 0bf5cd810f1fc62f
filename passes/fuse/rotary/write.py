"""`autopar.rotary` in the place of what was matched."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, lay_out_anew, replace, tensor_of
from autopar.kernels.rotary import rotary
from autopar.passes.fuse.rotary.match import Rotation

aten = torch.ops.aten


def write(found: Rotation) -> None:
    """Replace the rotation's root by the op, and erase what only led to it."""
    emit = Emitter(found.root.graph, before=found.root)
    shape = list(tensor_of(found.root).shape)
    x = _laid_out(emit, emit.cast(found.x, found.dtype), found.swapped)
    cos, sin = (_laid_out(emit, angles.write(emit), found.swapped) for angles in (found.cos, found.sin))
    out = emit.call(rotary, x, cos, sin, interleaved=found.interleaved)
    out = emit.call(aten.transpose.int, out, 1, 2) if found.swapped else out
    out = out if list(tensor_of(out).shape) == shape else emit.call(aten.reshape.default, out, shape)
    out = emit.cast(out, tensor_of(found.root).dtype)
    replace(found.root, out)
    for node in sorted(found.interior, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
    lay_out_anew(out)


def _laid_out(emit: Emitter, node: Node, swapped: bool) -> Node:
    """Four dims, heads before positions. Angles may have fewer where nothing is moved."""
    shape = list(tensor_of(node).shape)
    if len(shape) < 4:
        node = emit.call(aten.reshape.default, node, [1] * (4 - len(shape)) + shape)
    return emit.call(aten.transpose.int, node, 1, 2) if swapped else node
