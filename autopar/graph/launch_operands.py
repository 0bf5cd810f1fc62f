"""What collectives are given of a program's inputs: computed of nothing else, and for nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from autopar.ir.collectives import is_launch, wait


def made_of_inputs(nodes: Sequence[Node]) -> frozenset[Node]:
    """Those of `nodes`, calls in the order of the graph, that lie in a chain from one input to one collective: each reads the one before
    it alone, and is read by the next alone. The local part of a parameter, laid out to be gathered."""
    chained: set[Node] = set()
    for node in nodes:
        if len(node.all_input_nodes) == len(node.users) == 1 and node.target is not wait and not is_launch(node):
            (operand,) = node.all_input_nodes
            if operand.op == "placeholder" or operand in chained:
                chained.add(node)
    # A collective elsewhere has its operand written here as all else is; a sum over microbatches is no collective of the schedule.
    found, launches = set[Node](), {node for node in nodes if is_launch(node)}
    for node in reversed(nodes):
        if node in chained and any(user in launches or user in found for user in node.users):
            found.add(node)
    return frozenset(found)
