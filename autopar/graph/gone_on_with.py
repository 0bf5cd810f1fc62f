"""Whether a program goes on with what a collective brings, or only the caller gets it."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.graph.pieces import rearranges

aten = torch.ops.aten
# What a sum over ranks goes through on its way to the caller, beside what only rearranges it: tied parameters have one gradient, others a
# part of one, or a mean; the rows of a table of positions are those of all samples.
_PASSES_ON = frozenset(
    (aten._to_copy.default, aten.index_select.default, aten.slice.Tensor, aten.select.int, aten.constant_pad_nd.default)
    + (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.embedding_dense_backward.default)
)


def is_gone_on_with(launch: Node) -> bool:
    """Whether something computes with what a collective brings; gradients of parameters, and sums of them, are the caller's."""
    pending, seen = [launch], set[Node]()
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and not rearranges(user) and user.target not in _PASSES_ON:
                return True
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False
