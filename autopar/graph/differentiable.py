"""Which values of a FORWARD program get gradients."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.program import Program, operands

aten = torch.ops.aten


def differentiable(program: Program) -> set[Node]:
    """The nodes that autograd would reach from a parameter that is trained."""
    found = {node for item, node in program.named_inputs() if item.requires_grad}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        is_float = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
        if node.op == "call_function" and is_float and node.target is not aten.detach.default and not found.isdisjoint(operands(node)):
            found.add(node)
    return found
