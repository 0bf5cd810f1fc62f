"""Masks, positions and transposed weights: each stage that reads one makes it itself."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.collectives import is_launch
from autopar.ir.keys import PHASE, STAGE
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.local.copy_to_stages import CopyToStages
from autopar.passes.local.separate_microbatches import SeparateMicrobatches
from tests.support.models.masked import MaskedLayers, over_count
from tests.support.programs import PP2, calls, passed

aten = torch.ops.aten


def programs(mesh: Mesh = PP2) -> tuple[Program, Program]:
    """Before and after."""
    before = passed(MaskedLayers(over_count), (torch.randint(0, 6, (8, 3)),), SeparateMicrobatches, mesh)
    return before, CopyToStages().apply(before)


def stages_of(nodes: list[Node]) -> list[int]:
    return sorted(STAGE[node] for node in nodes)


def test_every_call_has_one_stage_and_a_phase() -> None:
    before, after = programs()
    assert any(node not in STAGE for node in before.graph.nodes if node.op == "call_function"), "else there was nothing to do"
    assert all(node in STAGE and node in PHASE for node in after.graph.nodes if node.op == "call_function")


def test_a_mask_that_two_stages_read_is_made_by_both_from_the_ids() -> None:
    before, after = programs()
    assert len(calls(before, aten.gt.Scalar)) == 1
    masks = calls(after, aten.gt.Scalar)
    assert stages_of(masks) == [0, 1]
    (ids,) = {mask.args[0] for mask in masks}
    assert isinstance(ids, Node) and ids.op == "placeholder"


def test_what_a_copy_is_made_of_is_of_its_stage() -> None:
    before, after = programs()
    alone = {node.name for node in before.graph.nodes if node.op == "call_function" and node not in STAGE}
    copies = [node for node in after.graph.nodes if "_stage" in node.name and node.name.split("_stage")[0] in alone]
    assert copies
    for node in copies:
        assert all(STAGE[each] == STAGE[node] for each in node.all_input_nodes if each.op == "call_function")
        assert all(STAGE[user] == STAGE[node] for user in node.users if user.op == "call_function")


def test_only_activations_and_gradients_cross() -> None:
    _, after = programs()
    crossing = {
        operand
        for node in after.graph.nodes
        for operand in node.all_input_nodes
        if node in STAGE and operand in STAGE and STAGE[node] != STAGE[operand]
    }
    assert {operand.meta["val"].dtype for operand in crossing} == {torch.float32}, "no mask of bools, no ids"
    # The residual sum is read as it is and as a view; its gradient comes in two parts, through the layer and past it.
    assert [PHASE[node] for node in after.graph.nodes if node in crossing] == ["forward", "backward", "backward"]


def test_what_one_stage_reads_is_there_once() -> None:
    before, after = programs()
    (count,) = (node for node in calls(before, aten.sum.default) if node.meta["val"].dtype == torch.int64)
    assert [node.name for node in calls(after, aten.sum.default) if node.meta["val"].dtype == torch.int64] == [count.name]


def test_a_collective_is_copied_with_its_wait() -> None:
    """The count of the labels is summed over dp by every stage that needs it."""
    _, after = programs(Mesh((("pp", 2), ("dp", 2))))
    for launch in (node for node in after.graph.nodes if is_launch(node)):
        assert len(launch.users) == 1 and {STAGE[user] for user in launch.users} == {STAGE[launch]}


def test_a_copy_that_the_backward_alone_reads_is_made_in_the_backward() -> None:
    _, after = programs()
    for node in after.graph.nodes:
        readers = {PHASE[user] for user in node.users if user.op == "call_function"}
        if "_stage" in node.name and readers:
            assert PHASE[node] == ("forward" if "forward" in readers else "backward")
