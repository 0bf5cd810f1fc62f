"""`autopar.add_dropout` or `autopar.dropout` in the place of what was matched."""

from __future__ import annotations

import torch

from autopar.graph.emit import Emitter, lay_out_anew, replace, tensor_of
from autopar.kernels.dropout import add_dropout, dropout
from autopar.passes.fuse.dropout.match import Dropped

aten = torch.ops.aten


def write(found: Dropped) -> None:
    """Replace the root by the op, and erase what only led to it. What drew the mask is left for dead code to be eliminated."""
    emit, root, draw = Emitter(found.root.graph, before=found.root), tensor_of(found.root), found.draw
    x = found.x if found.x_dtype is None else emit.cast(found.x, found.x_dtype)
    positions, options = (draw.rows, draw.second, draw.columns), {"keep_below": draw.keep_below, "scale": found.scale}
    if found.residual is None:
        out = emit.call(dropout, x, *positions, **options, dtype=root.dtype)
    else:
        shape, residual = tensor_of(x).shape, found.residual
        residual = residual if shape == root.shape else emit.call(aten.reshape.default, residual, list(shape))
        out = emit.call(add_dropout, x, residual, *positions, **options)
        out = out if shape == root.shape else emit.call(aten.reshape.default, out, list(root.shape))
    out = emit.cast(out, root.dtype)
    replace(found.root, out)
    for node in sorted(found.interior, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
    lay_out_anew(out)
