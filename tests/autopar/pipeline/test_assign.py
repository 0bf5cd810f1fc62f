"""Stages of the forward carried over to the whole step."""

from __future__ import annotations

import copy
import operator

import torch
from torch import Tensor, nn
from torch.fx import Node

import autopar
from autopar.ir.keys import PHASE
from autopar.ir.program import Program
from autopar.kernels.normalisation import norm
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.pipeline.assign import assign_stages, copied
from tests.support.models.masked import MaskedLayers, tied
from tests.support.programs import calls, passed

aten = torch.ops.aten


def program(model: nn.Module | None = None, *args: Tensor) -> Program:
    return passed(model or MaskedLayers(tied), args or (torch.randint(0, 6, (4, 3)),), InsertReshards)


def products(found: Program) -> list[Node]:
    """Those of the forward."""
    return [node for node in calls(found, aten.mm.default) if PHASE[node] == "forward"]


def cut_at(found: Program, first: Node) -> dict[Node, int]:
    """The stages when everything from `first` on is on the second."""
    names = [node.name for node in found.graph.nodes]
    forward = {
        node: int(names.index(node.name) >= names.index(first.name))
        for node in found.graph.nodes
        if node.op == "call_function" and PHASE[node] == "forward"
    }
    return assign_stages(found, forward, 2)


def test_what_follows_from_inputs_or_from_parameters_alone_is_made_by_every_stage() -> None:
    found = program()
    everywhere = copied(found)
    assert set(calls(found, aten.gt.Scalar)) <= everywhere, "the mask"
    assert {node for node in calls(found, aten.t.default) if PHASE[node] == "forward"} <= everywhere, "transposed weights"
    assert not everywhere.intersection([*calls(found, aten.embedding.default), *calls(found, aten.mm.default)])
    assert not everywhere.intersection(cut_at(found, products(found)[1]))


def test_activations_flow_on_and_gradients_flow_back() -> None:
    found = program()
    for first in products(found):
        stages = cut_at(found, first)
        assert set(stages) == {node for node in found.graph.nodes if node.op == "call_function"} - copied(found)
        for node, stage in stages.items():
            for operand in node.all_input_nodes:
                if operand in stages and PHASE[node] == "forward":
                    assert stages[operand] <= stage
                elif operand in stages and PHASE[operand] == "backward":
                    assert stages[operand] >= stage
        backward = [node for node in stages if PHASE[node] == "backward"]
        assert {stages[node] for node in backward} == {0, 1}


def test_a_backward_is_where_its_forward_is() -> None:
    found = program()
    stages = cut_at(found, products(found)[1])
    assert {stages[node] for node in calls(found, aten.embedding_dense_backward.default)} == {0}
    assert sorted(stages[node] for node in calls(found, aten.tanh_backward.default)) == [0, 1]
    assert sorted(stages[node] for node in calls(found, aten.tanh.default)) == [0, 1]


def test_a_result_stays_with_the_op_that_has_several() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for each in self.norms:
                x = torch.tanh(each(x))
            return x.sum()

    found = program(Norms(), torch.randn(4, 4))
    stages = cut_at(found, calls(found, norm)[1])
    selected = calls(found, operator.getitem)
    assert {stages[node] for node in selected} == {0, 1}
    assert all(stages[node] == stages[node.args[0]] for node in selected if isinstance(node.args[0], Node))


def test_the_gradients_of_a_tie_are_summed_where_both_have_arrived() -> None:
    found = program()
    stages = cut_at(found, products(found)[1])
    (gradient,) = (node for item, node in found.named_outputs() if item.kind == "gradient" and item.name == "symbols.weight")
    while gradient.target is not aten.add.Tensor:
        gradient = gradient.all_input_nodes[0]
    assert stages[gradient] == 0 and sorted(stages[each] for each in gradient.all_input_nodes) == [0, 1]


class Dispatched(nn.Module):
    """Who goes to which expert has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(8, 4))
        self.experts = nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x @ self.router).detach()
        return torch.einsum("ed,edf->ef", chosen.T @ x, self.experts).square().mean()


def test_a_parameters_gradient_ends_where_the_parameter_is() -> None:
    """What has no gradient moves autograd's numbers on by nothing: a view of it has that of a view of the parameter."""
    model, x = Dispatched().double(), torch.randn(24, 8, dtype=torch.float64)
    parallel = autopar.compile(copy.deepcopy(model), autopar.virtual_mesh(pp=2), example_inputs=(x,), backend="eager")
    for module in (model, parallel):
        module(x).backward()
    assert len(parallel.compiled.schedule.places) == 2
    gradients = {name: each.grad for name, each in parallel.named_parameters()}
    assert gradients["router"] is None
    assert torch.allclose(gradients["experts"], model.experts.grad, rtol=1e-9, atol=0)
