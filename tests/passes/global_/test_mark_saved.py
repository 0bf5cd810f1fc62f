"""The backward reads of the forward what is saved, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from autopar.frontend.capture import capture
from autopar.ir.keys import PHASE
from autopar.ir.markers import save
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.global_.mark_saved import MarkSaved
from autopar.passes.global_.trace_joint import TraceJoint

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.second = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden.view(-1, 16)).square().sum()


def traced() -> Program:
    return TraceJoint().apply(capture(Net(), (torch.randn(2, 3, 8),), {}, virtual_mesh(dp=1)))


def marked() -> Program:
    return MarkSaved().apply(traced())


def saved(program: Program) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.target is save]


def test_the_backward_reads_inputs_and_saved_values_only() -> None:
    program = marked()
    read = {
        operand
        for node in program.graph.nodes
        if node.op == "call_function" and PHASE.get(node) == "backward"
        for operand in node.all_input_nodes
    }
    assert all(node.op == "placeholder" or node.target is save or PHASE.get(node) == "backward" for node in read)
    assert {PHASE[node] for node in saved(program)} == {"forward"}


def test_a_value_and_its_views_are_saved_once() -> None:
    values = [node.args[0].target for node in saved(marked())]  # type: ignore[union-attr]
    assert values.count(aten.tanh.default) == 1
    assert not set(values) & {aten.view.default, aten.t.default, aten.permute.default}


def test_weights_are_read_as_they_lie() -> None:
    program = marked()
    parameters = {node for item, node in program.named_inputs() if item.kind == "parameter"}
    assert not any(node.args[0] in parameters for node in saved(program))


def test_what_is_computed_stays_the_same() -> None:
    program = traced()
    values = [torch.randn(item.shape) for item in program.signature.inputs]
    before, after = program.module()(*values), MarkSaved().apply(program).module()(*values)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
