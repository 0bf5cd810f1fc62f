"""Which values of a FORWARD program get gradients."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.graph.overwrites import memory_of, writes, written_by
from autopar.ir.program import Program, operands

aten = torch.ops.aten


def differentiable(program: Program) -> set[Node]:
    """The nodes that autograd would reach from a parameter that is trained, and the memory that such were written into."""
    found = {node for item, node in program.named_inputs() if item.requires_grad}
    for node in program.graph.nodes:
        if (
            node.op == "call_function"
            and is_float(node)
            and node.target is not aten.detach.default
            and not found.isdisjoint(operands(node))
        ):
            found.add(node)
            if writes(node):
                found.add(memory_of(written_by(node)))
    return found


def is_float(node: Node) -> bool:
    """Whether the value of `node` is real or complex; what is no tensor may hold such."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
