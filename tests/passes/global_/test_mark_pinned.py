"""Outputs of modules become `pinned` nodes: which value, who reads it, and what may be done with it later."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Node

from autopar.driver.manager import run_passes
from autopar.frontend.capture import capture
from autopar.ir.keys import PHASE, SOURCE
from autopar.ir.markers import pinned, save
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.decompose_losses import DecomposeLosses
from autopar.passes.global_.mark_pinned import MarkPinned
from autopar.passes.global_.mark_saved import MarkSaved
from autopar.passes.global_.trace_joint import TraceJoint
from tests.support.models.residual import Residual, batch
from tests.support.programs import assert_close, inputs_of, run

aten = torch.ops.aten


def joint(model: nn.Module) -> Program:
    return run_passes(capture(model, batch(), {}, virtual_mesh(dp=2)), (DecomposeLosses(), TraceJoint(True)))


@pytest.fixture(scope="module")
def residual() -> Program:
    return joint(Residual())


def marked(program: Program, *patterns: str) -> list[Node]:
    return MarkPinned(patterns).apply(program).graph.find_nodes(op="call_function", target=pinned)


def test_a_modules_last_value_is_pinned_and_read_outside(residual: Program) -> None:
    nodes = marked(residual, "blocks.*.mlp")
    assert [SOURCE[node].module for node in nodes] == ["blocks.0.mlp", "blocks.1.mlp"]
    for node in nodes:
        (source,) = node.all_input_nodes
        assert SOURCE[source].module.endswith("mlp.down") and list(source.users) == [node]
        assert PHASE[node] == "forward" and node.meta["val"].shape == (4, 8, 16)
        assert any(user.target is aten.add.Tensor and SOURCE[user].module in ("blocks.0", "blocks.1") for user in node.users)


def test_a_module_within_a_module_is_pinned_first(residual: Program) -> None:
    inner, outer = sorted(marked(residual, "blocks.0.mlp", "blocks.0.mlp.down"), key=lambda node: SOURCE[node].module, reverse=True)
    assert SOURCE[inner].module == "blocks.0.mlp.down" and SOURCE[outer].module == "blocks.0.mlp"
    assert outer.all_input_nodes == [inner] and list(inner.users) == [outer]


def test_each_call_of_a_module_is_pinned() -> None:
    nodes = marked(joint(Residual(num_blocks=1, repeats=3)), "blocks.0.mlp")
    assert len(nodes) == 3 and {SOURCE[node].module for node in nodes} == {"blocks.0.mlp"}
    assert len({node.all_input_nodes[0] for node in nodes}) == 3


def test_values_are_unchanged(residual: Program) -> None:
    model = Residual()
    inputs = inputs_of(residual, model, batch(), {})
    assert_close(run(MarkPinned(("*.up", "*.mlp", "head", "table")).apply(residual), inputs), run(residual, inputs), 0.0)


def test_the_backward_reads_what_is_pinned_and_saves_it_once(residual: Program) -> None:
    program = run_passes(residual, (MarkPinned(("blocks.*.mlp.up",)), MarkSaved()))
    for node in program.graph.find_nodes(op="call_function", target=pinned):
        (source,) = node.all_input_nodes
        assert not any(user.target is save or PHASE[user] == "backward" for user in source.users)


def test_what_nothing_matches_is_left_alone(residual: Program) -> None:
    assert MarkPinned(("nothing", "blocks.*.mlp.up.weight")).apply(residual) is residual or not marked(residual, "nothing")
    assert marked(residual, "blocks.*.mlp.up.weight") == []
    # `*` in the middle is one part of a path: blocks, not what is in them.
    assert {SOURCE[node].module for node in marked(residual, "blocks.[0-9]")} == {"blocks.0", "blocks.1"}
