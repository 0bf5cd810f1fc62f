"""What attention gives lies otherwise in an export than in a program: there as its query lies, here with the heads of a position together.

`contiguous()` has nothing to do in the one and copies in the other.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from autopar._torch import OpOverload
from autopar.graph.overwrites import is_written_after, memory_of

aten = torch.ops.aten


def copies_of_attention_kept(graph: Graph) -> None:
    """Of attention, and of what ops make of it element by element: a view may have to copy, since the export may have left out a
    `contiguous()` in front of it, and a `contiguous()` that is there has copied, which shows where the copy is written into."""
    lying = set[Node]()
    for node in graph.nodes:
        if node.op == "call_function" and (node.target is aten.scaled_dot_product_attention.default or _keeps_strides(node, lying)):
            lying.add(node)
        elif node.target not in (aten.view.default, aten.contiguous.default) or memory_of(node) not in lying:
            continue
        elif node.target is aten.view.default and not is_written_after(node, node):
            node.target = aten.reshape.default
        elif node.target is aten.contiguous.default and is_written_after(node, node):
            node.target, node.kwargs = aten.clone.default, {"memory_format": torch.contiguous_format}


def _keeps_strides(node: Node, lying: set[Node]) -> bool:
    """Whether `node` is made element by element of a value that is `lying`."""
    is_pointwise = node.target is aten.dropout.default or (isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags)
    return is_pointwise and any(memory_of(operand) in lying for operand in node.all_input_nodes)
