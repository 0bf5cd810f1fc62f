"""Where the gradient of a parameter is cast, on its way from the ops that make it: ranks may sum it before or behind that."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.keys import PHASE
from autopar.ir.program import Program
from autopar.ops.traits import WHOLE_VIEWS

aten = torch.ops.aten

# What a sum in parts passes through.
_LINEAR = WHOLE_VIEWS | {aten._to_copy.default, aten.add.Tensor, aten.clone.default, aten.neg.default}


def sums_in_other_dtypes(program: Program) -> frozenset[Node]:
    """The values of a GLOBAL program that a parameter's gradient is made of by casts, sums and views, in other dtypes than
    `program.reduce`: what ranks hold of them in parts should be summed behind the cast, or before it. None where there is no choice.
    """
    if program.reduce is None:
        return frozenset()
    found: set[Node] = set()
    for output, node in program.named_outputs():
        if output.kind == "gradient":
            chain = _chain(node)
            others = {each for each in chain if each.meta["val"].dtype != program.reduce}
            found |= others if len(others) < len(chain) else set()
    return frozenset(found)


def _chain(gradient: Node) -> set[Node]:
    """The gradient, and what it is made of."""
    found, pending = set[Node](), [gradient]
    while pending:
        node = pending.pop()
        if node not in found and node.op == "call_function" and PHASE.get(node) == "backward":
            found.add(node)
            pending += node.all_input_nodes if node.target in _LINEAR or _sums_rows(node) else []
    return found


def _sums_rows(node: Node) -> bool:
    """Whether it puts into a table what was summed over the batch before (positions, of which every sample has the same)."""
    return node.target is aten.embedding_dense_backward.default and node.all_input_nodes[0].target is aten.sum.dim_IntList
