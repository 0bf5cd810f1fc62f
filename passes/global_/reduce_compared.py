"""Reduce a partial sum once, before a comparison reads it, so that both sides of the comparison see the same number."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.emit import copy_origin
from autopar.ir.keys import PHASE
from autopar.ir.markers import pinned, reduced, save
from autopar.ir.program import Program
from autopar.ops.traits import WHOLE_VIEWS

aten = torch.ops.aten

_COMPARISONS = frozenset({aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor})
# Of a difference they compare its two sides.
_SIGNS = frozenset({aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar})
# They move, pick, copy, convert or turn round numbers that were made above.
_CARRY = WHOLE_VIEWS | {
    aten.expand.default, aten.detach.default, aten.slice.Tensor, aten.select.int, aten.gather.default, aten.index.Tensor,
    aten.index_select.default, aten.cat.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.clone.default,
    aten._to_copy.default, aten.where.self, aten.neg.default, aten.abs.default, save, pinned,
}  # fmt: skip


@dataclass(frozen=True)
class ReduceCompared:
    """Give each value that is compared with another one a `reduced` node, and let all read that.

    The backward of a maximum asks which elements equal it, a nucleus which are not below its last. Ranks that hold a value as
    a sum add it up in one order for an all-reduce and in another for a reduce-scatter: the last bits differ, and of one reader's
    elements none would equal the other's maximum. Settled, a sum is reduced once; what readers want else is cut or gathered.

    The node stands where the value was computed, before it was moved, indexed or copied: both sides may be made from it.

    Reads: PHASE. Writes: `reduced` nodes with PHASE, SOURCE. Ensures: values are unchanged; no floating-point value that a
    comparison of two tensors shows, or that of a difference with a number, is left as an unreduced sum.
    """

    name: str = "reduce compared"

    def apply(self, program: Program) -> Program:
        if not any(True for _ in _compared(program)):
            return program
        program = program.copy()
        for value in dict.fromkeys(_compared(program)):
            with program.graph.inserting_after(value):
                node = program.graph.call_function(reduced, (value,))
            value.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user is not node)
            node.meta["val"] = value.meta["val"]
            copy_origin(value, node)
            PHASE[node] = PHASE.get(value) or "forward"
        return program


def _compared(program: Program) -> Iterator[Node]:
    """The floating-point values that calls made and comparisons read, wherever these were carried in between."""
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in _COMPARISONS:
            yield from _made(node.all_input_nodes)
        elif node.op == "call_function" and node.target in _SIGNS:
            differences = [each for each in _made(node.all_input_nodes) if each.target is aten.sub.Tensor]
            yield from _made(operand for each in differences for operand in each.all_input_nodes)


def _made(values: Iterable[Node]) -> Iterator[Node]:
    """The floating-point results of calls that `values` show."""
    pending, seen = list(values), set[Node]()
    while pending:
        node = pending.pop()
        value = node.meta.get("val")
        if node in seen or node.op != "call_function" or (isinstance(value, torch.Tensor) and not value.dtype.is_floating_point):
            continue
        seen.add(node)
        picks = node.target is operator.getitem and node.all_input_nodes[0].target in _CARRY
        if picks or node.target in _CARRY:
            pending += node.all_input_nodes
        else:
            yield node
