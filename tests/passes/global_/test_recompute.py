"""The pass by itself: what each mode keeps, and what the backward then reads."""

from __future__ import annotations

import logging
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.ir.keys import PHASE, RECOMPUTED, SOURCE
from autopar.ir.markers import save
from autopar.ir.program import Form, Program
from autopar.passes.global_.recompute import Recompute
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.residual import WIDTH, Residual, batch, parallel_residual

aten = torch.ops.aten


@cache
def residual(mode: str) -> ParallelModule:
    return parallel_residual(recompute=mode)


def again(program: Program, target: object = None) -> list[Node]:
    return [node for node in program.graph.nodes if node in RECOMPUTED and target in (None, node.target)]


def saved(program: Program) -> list[Node]:
    return [node.all_input_nodes[0] for node in program.graph.nodes if node.target is save]


def test_the_backward_reads_what_is_saved_and_copies_stand_in_it() -> None:
    program = residual("full").compiled.program
    calls = [node for node in program.graph.nodes if node.op == "call_function" and PHASE[node] == "backward"]
    read = {operand for node in calls for operand in node.all_input_nodes}
    assert all(node.op == "placeholder" or node.target is save or PHASE[node] == "backward" for node in read)
    assert again(program) and all(PHASE[node] == "backward" for node in again(program))


def test_full_keeps_of_a_layer_what_it_makes_for_others() -> None:
    within = [SOURCE[node].module for node in saved(residual("full").compiled.program)]
    assert not any(".mlp" in module or ".norm" in module for module in within), within
    kept = [SOURCE[node].module for node in saved(residual("none").compiled.program)]
    assert sum(".mlp" in module or ".norm" in module for module in kept) >= 4, kept


def test_selective_multiplies_nothing_again() -> None:
    assert again(residual("full").compiled.program, aten.mm.default)
    assert not again(residual("selective").compiled.program, aten.mm.default)
    assert again(residual("selective").compiled.program)


def test_a_layer_is_computed_again_where_its_backward_begins() -> None:
    calls = [node for node in residual("full").compiled.program.graph.nodes if node.op == "call_function"]
    places = {
        layer: [place for place, node in enumerate(calls) if node in RECOMPUTED and SOURCE[node].module.startswith(layer)]
        for layer in ("blocks.0", "blocks.1")
    }
    backward = [place for place, node in enumerate(calls) if PHASE[node] == "backward" and node not in RECOMPUTED]
    of_last = [place for place in backward if SOURCE[calls[place]].module.startswith("blocks.1")]
    assert max(places["blocks.1"]) < min(places["blocks.0"])
    assert max(of_last) < min(places["blocks.0"])


def test_nothing_is_computed_again_without_being_asked_for() -> None:
    for mode in ("none", "auto"):
        assert not again(residual(mode).compiled.program)
        assert residual(mode).summary()["recompute"] is None


def test_explain_and_summary_say_what_and_at_what_price() -> None:
    parallel = residual("full")
    found = parallel.summary()["recompute"]
    assert found is not None
    assert found["calls"] == len(again(parallel.compiled.program)) and found["seconds"] > 0
    assert found["saved_bytes"] < found["saved_bytes_before"] == residual("none").summary()["memory"]["saved_activations"]
    assert "computed again in the backward\n  full: each layer" in parallel.explain(detail="recompute")


def test_without_layers_it_is_said_that_there_are_none() -> None:
    model = nn.Sequential()
    model.add_module("up", nn.Linear(WIDTH, WIDTH))
    x = (torch.ones(4, WIDTH),)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=x, backend="eager", recompute="full")
    assert "so there are no layers" in parallel.explain(detail="recompute")


def test_a_plan_has_what_is_computed_again() -> None:
    plan = residual("selective").plan
    assert plan.recomputed and autopar.Plan.from_json(plan.to_json()) == plan
    parallel = parallel_residual(plan=plan)
    assert parallel.plan.recomputed == plan.recomputed
    assert not parallel_residual(plan=plan, recompute="none").plan.recomputed


def test_what_one_rank_decided_is_read_by_another() -> None:
    parallel = residual("full")
    (step,) = [each for each in parallel.compiled.steps if each.kind is Recompute]
    before, chosen = parallel.compiled.steps[step.number - 1].program, Recompute("full")
    assert before.form is Form.GLOBAL
    decision = chosen.decide(before)
    assert chosen.read(before, chosen.written(before, decision)) == decision


class Checkpointed(Residual):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_checkpointed_regions_bind_unless_they_are_overruled(caplog: pytest.LogCaptureFixture) -> None:
    parallel = parallel_residual(Checkpointed().double())
    assert {SOURCE[node].module.split(".")[1] for node in again(parallel.compiled.program)} == {"0", "1"}
    assert "the model's 2 checkpointed regions" in parallel.explain(detail="recompute")
    assert parallel.verify(*batch(), promote=True)
    found = parallel.summary()["recompute"]
    assert found is not None and found["saved_bytes"] < 0.7 * found["saved_bytes_before"]
    with caplog.at_level(logging.WARNING, "autopar"):
        plain = parallel_residual(Checkpointed().double(), recompute="none")
    assert not again(plain.compiled.program)
    assert 'recompute="none": the model\'s 2 regions under torch.utils.checkpoint are kept' in caplog.text
