"""Which calls make the operand of a collective of one input, and of nothing else."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from autopar.graph.launch_operands import made_of_inputs
from autopar.ir.collectives import all_gather, wait

aten = torch.ops.aten


def chain(graph: Graph, x: Node) -> tuple[Node, Node, Node]:
    """Laid out, flat, gathered."""
    laid = graph.call_function(aten.t.default, (x,))
    flat = graph.call_function(aten.reshape.default, (laid, [-1]))
    return laid, flat, graph.call_function(wait, (graph.call_function(all_gather, (flat, ("dp",), 2)),))


def calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def test_the_way_of_a_parameter_into_its_gather_is_found() -> None:
    graph = Graph()
    laid, flat, whole = chain(graph, graph.placeholder("w"))
    graph.output((graph.call_function(aten.neg.default, (whole,)),))
    assert made_of_inputs(calls(graph)) == {laid, flat}


def test_not_what_somebody_else_reads_nor_what_is_made_of_other_values() -> None:
    graph = Graph()
    laid, _, whole = chain(graph, graph.placeholder("w"))
    graph.call_function(aten.neg.default, (laid,))
    chain(graph, graph.call_function(aten.mul.Tensor, (whole, whole)))
    chain(graph, graph.call_function(aten.mul.Tensor, (graph.placeholder("a"), graph.placeholder("b"))))
    graph.call_function(aten.neg.default, (graph.placeholder("c"),))
    assert not made_of_inputs(calls(graph)) - {node for node in graph.nodes if node.target is aten.mul.Tensor}


def test_not_where_the_collective_stands_elsewhere() -> None:
    graph = Graph()
    chain(graph, graph.placeholder("w"))
    assert not made_of_inputs([node for node in calls(graph) if node.target not in (all_gather, wait)])
