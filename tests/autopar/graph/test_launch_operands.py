"""Which calls make the operand of a collective of one input, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

import autopar
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


class Made(nn.Module):
    """What goes into a collective is made of one input, which is not the first argument of what makes it."""

    def __init__(self, loss: Callable[[Made, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4, bias=False), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x)


MADE: dict[str, tuple[Callable[[Made, Tensor], Tensor], dict[str, Any]]] = {
    "stacked": (lambda model, x: (x @ torch.stack([model.linear.weight, model.linear.weight])).square().mean(), {"tp": 2}),
    "joined": (lambda model, x: (x @ torch.cat([model.linear.weight, model.linear.weight], 1)).square().mean(), {"dp": 2, "zero": 3}),
    "power": (lambda model, x: ((2**x).sort(0)[0] * model.linear(x)).mean(), {"dp": 2}),
}


@pytest.mark.parametrize("name", MADE)
def test_what_reads_its_input_behind_its_first_argument(name: str) -> None:
    loss, options = MADE[name]
    x, zero = torch.randn(4, 4, dtype=torch.float64), options.get("zero")
    mesh = autopar.virtual_mesh(**{axis: size for axis, size in options.items() if axis != "zero"})
    assert autopar.compile(Made(loss).double(), mesh, example_inputs={"x": x}, backend="eager", zero=zero).verify(x=x)
