"""What calls of a GLOBAL program take within themselves, on one rank: of the whole op that is counted by running it on tensors without
memory (`autopar.cost.fragment_memory`), and a rank takes the share of it that it has of operands and results."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from autopar.cost.fragment_memory import fragment_memory
from autopar.cost.model import CostModel, is_view
from autopar.ir.collectives import reshard
from autopar.ir.keys import STRATEGY
from autopar.ir.program import results_of


class InsideBytes:
    """By call, each kind of call counted once."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._known: dict[str, int] = {}

    def of(self, node: Node) -> float:
        if node.target is reshard or is_view(node) or node not in STRATEGY:
            return 0.0
        key = self._kind(node)
        if key not in self._known:
            self._known[key] = _counted(node)
        if not self._known[key]:
            return 0.0
        values = [value for each in (node, *node.all_input_nodes) for value in results_of(each) if value is not None]
        whole = sum(value.nbytes for value in values)
        return self._known[key] * min(self.cost.traffic_bytes(node, STRATEGY[node]) / whole, 1.0) if whole else 0.0

    def _kind(self, node: Node) -> str:
        types = [[(value.dtype, tuple(value.shape)) for value in results_of(each) if value is not None] for each in node.all_input_nodes]
        return f"{node.target} {types} {map_arg((node.args, node.kwargs), lambda operand: node.all_input_nodes.index(operand))}"


def _counted(node: Node) -> int:
    """Of the whole op, beside its operands and results."""
    if not all(isinstance(each.meta.get("val"), torch.Tensor) for each in node.all_input_nodes):
        return 0
    graph, given = Graph(), dict[Node, Node]()
    for each in node.all_input_nodes:
        given[each] = graph.placeholder(each.name)
        given[each].meta = {"val": each.meta["val"]}
    copy = graph.node_copy(node, given.__getitem__)
    graph.output((copy,))
    return fragment_memory(GraphModule(torch.nn.Module(), graph)).temporary_bytes
