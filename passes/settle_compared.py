"""A number that is compared with what was made of it is the same number for both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.emit import copy_origin, tensor_of
from autopar.keys import PHASE
from autopar.markers import pinned, save, settled
from autopar.program import Program
from autopar.views import WHOLE_VIEWS

aten = torch.ops.aten

_COMPARISONS = frozenset({aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor})
# What shows the same numbers, and is therefore settled where they are made.
_SHOWS = WHOLE_VIEWS | {aten.expand.default, aten.detach.default, save, pinned}


@dataclass(frozen=True)
class SettleCompared:
    """Give each value that is compared with another one a `settled` node, and let all read that.

    The backward of a maximum asks which elements equal it, a nucleus which are not below its last. Ranks that hold a value as
    a sum add it up in one order for an all-reduce and in another for a reduce-scatter: the last bits differ, and of one reader's
    elements none would equal the other's maximum. Settled, a sum is reduced once; what readers want else is cut or gathered.

    Reads: PHASE. Writes: `settled` nodes with PHASE, SOURCE. Ensures: values are unchanged; no floating-point value that a
    comparison of two tensors reads is left as an unreduced sum.
    """

    name: str = "settle compared"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        for value in dict.fromkeys(_compared(program)):
            with program.graph.inserting_after(value):
                node = program.graph.call_function(settled, (value,))
            value.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user is not node)
            node.meta["val"] = value.meta["val"]
            copy_origin(value, node)
            PHASE[node] = PHASE.get(value) or "forward"
        return program


def _compared(program: Program) -> Iterator[Node]:
    """The floating-point values that calls made and comparisons read, through views and markers."""
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in _COMPARISONS:
            for value in map(_shown, node.all_input_nodes):
                if value.op == "call_function" and tensor_of(value).dtype.is_floating_point:
                    yield value


def _shown(node: Node) -> Node:
    while node.op == "call_function" and node.target in _SHOWS:
        node = node.all_input_nodes[0]
    return node
