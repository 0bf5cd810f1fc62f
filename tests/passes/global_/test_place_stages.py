"""Stages in a program: by cost, by a plan, and what is said of the cuts."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.errors import PlanError
from autopar.ir.keys import PHASE, STAGE
from autopar.ir.program import Program
from autopar.passes.global_.place_stages import PlaceStages
from autopar.pipeline.placement_units import line_of
from autopar.plans.decisions import StageDecision
from autopar.plans.plan import Plan
from tests.support.models.residual import interleaved_pipe, plain_pipe

A100 = Cluster.named("8xa100")


def before(parallel) -> Program:  # type: ignore[no-untyped-def]
    return next(step.program for step in parallel.compiled.steps if step.name == "insert reshards")


def decided(plan: Plan | None = None) -> StageDecision:
    return PlaceStages(A100, plan=plan).decide(before(plain_pipe()))


def test_activations_flow_to_later_stages_and_gradients_to_earlier_ones() -> None:
    program = PlaceStages(A100).apply(before(plain_pipe()), decided())
    for node in program.graph.nodes:
        for operand in node.all_input_nodes if node in STAGE else ():
            if operand in STAGE and PHASE[operand] == PHASE[node]:
                later, earlier = (node, operand) if PHASE[node] == "forward" else (operand, node)
                assert STAGE[later] >= STAGE[earlier]


def test_the_same_program_is_cut_alike() -> None:
    assert decided() == decided() and decided().stages == plain_pipe().compiled.stages.stages


def test_the_next_best_has_one_cut_moved_by_one_unit() -> None:
    found = decided()
    (start,) = found.placement.starts[1:]
    assert found.place is not None
    others = [found.place((0, moved)) for moved in (start - 1, start + 1)]
    assert found.next_best == min(others, key=lambda each: each.slowest_seconds)
    assert found.next_best.slowest_seconds >= found.placement.slowest_seconds


def test_a_plan_cuts_where_it_did() -> None:
    plan = plain_pipe().plan
    found = decided()
    assert found.place is not None
    elsewhere = found.place((0, 4))
    program = before(plain_pipe())
    pass_ = PlaceStages(A100)
    moved = Plan.of(program, None, replace(found, cuts=(_first_of(pass_, program, 4),)))
    again = decided(moved)
    assert again.placement.starts == (0, 4) == elsewhere.starts and again.reason == "by the plan"
    assert again.reasons == {"stage 1": f"from {elsewhere.stages[1].first_name} on: by the plan"}
    assert decided(plan).stages == found.stages


def _first_of(pass_: PlaceStages, program: Program, unit: int) -> str:
    return line_of(program, CostModel(pass_.cluster, program.mesh)).nodes[unit][0].name


def test_a_plan_of_another_number_of_stages_is_placed_anew(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        found = decided(interleaved_pipe().plan)
    assert found.placement == decided().placement and found.reason == ""
    assert "the plan's stages do not fit: " in caplog.text and "they are placed anew" in caplog.text


def test_a_plan_without_a_pipeline_says_nothing_of_stages() -> None:
    assert decided(replace(plain_pipe().plan, schedule=None, cuts=())).placement == decided().placement


def test_reasons_name_where_a_stage_begins() -> None:
    found = decided()
    first = found.placement.stages[1].first_name
    assert list(found.reasons) == ["stage 1"] and found.reasons["stage 1"].startswith(f"from {first} on: by cost, the slowest stage ")


class Untrained(nn.Module):
    """What its layer gives is not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean() * 2


def test_a_loss_that_every_stage_computes_for_itself_cannot_be_cut() -> None:
    with pytest.raises(PlanError, match="2 pipeline stages, but only 1 unit of work"):
        autopar.compile(Untrained(), autopar.virtual_mesh(pp=2), example_inputs=(torch.randn(4, 3),), backend="eager")


def test_a_frozen_trunk_is_cut_like_one_that_trains() -> None:
    """Autograd counts no call of it; and what is frozen behind the first call stays where it lies."""
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(6, 1))
    x = torch.randn(4, 5, 6)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    trained = autopar.compile(Loss(), autopar.virtual_mesh(pp=2), example_inputs=(x,), backend="eager")
    for layer in layers:
        layer.requires_grad_(False)
    trained(x)
    frozen = autopar.compile(Loss(), autopar.virtual_mesh(pp=2), example_inputs=(x,), backend="eager").compiled.stages
    assert frozen is not None and frozen.placement.stages[1].first_name.startswith("inner.2.0")
