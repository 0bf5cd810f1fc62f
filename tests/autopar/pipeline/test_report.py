"""What a person reads of a pipeline: stages, grid, step, and why it is cut there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from autopar.cost.hardware.cluster import Host
from autopar.cost.model import CostModel
from autopar.pipeline.report import StepOnPaper, cut_lines, pipeline_lines, shortened
from autopar.pipeline.schedules import generate
from autopar.pipeline.simulate import simulate
from autopar.reports.summary import cost_of
from tests.support.models.residual import interleaved_pipe, piped, plain_pipe


def test_explain_shows_stages_grid_and_step() -> None:
    compiled = plain_pipe().compiled
    text = plain_pipe().explain(detail="all")
    section = text[text.index("\npipeline\n") :].split("\n\n")[0]
    for line in (*str(compiled.stages.placement).splitlines(), *str(compiled.order).splitlines()):
        assert line.strip() in section
    found = StepOnPaper(compiled.program, compiled.cost, compiled.order)
    assert found.simulation.step_seconds == simulate(compiled.order, found.prices).step_seconds
    assert re.search(r"a step takes \S+ [mµ]s on paper, of which ranks idle \d+\.\d%; the update \S+ \S+ more", section)
    assert "it waits for 0F0 " in section
    assert re.search(r"at most \S+ kB on rank 0, \S+ kB on rank 1", section)
    assert "clip gradients by parallel.clip_grad_norm_" in section


def test_the_reason_for_a_cut_is_what_another_would_cost() -> None:
    compiled = plain_pipe().compiled
    (line,) = cut_lines(compiled)
    assert line.startswith("cut by cost: the slowest stage, ") and "with stage 1 from " in line
    other = compiled.stages.next_best
    assert other.slowest_seconds >= compiled.stages.placement.slowest_seconds
    assert abs(other.starts[1] - compiled.stages.placement.starts[1]) == 1


def test_microbatches_alone_need_no_grid() -> None:
    compiled = piped(pp=1, num_microbatches=4, dp=1).compiled
    lines = list(pipeline_lines(compiled, cost_of(compiled)))
    assert lines[0] == "4 microbatches, one after another" and "idle" not in lines[1]
    assert not any("rank 0 |" in line or "clip" in line for line in lines)


def test_a_program_without_gradients_runs_its_forwards() -> None:
    with torch.no_grad():
        compiled = piped().compiled
    paper = StepOnPaper(compiled.program, compiled.cost, compiled.order)
    assert {action.kind for row in paper.executed.orders for action in row} == {"F"}
    assert all("B0" not in line for line in pipeline_lines(compiled, cost_of(compiled)))


def test_wide_grids_are_cut() -> None:
    lines = str(generate("1f1b", 8, 64)).splitlines()
    assert lines[9] == "" and len(lines) > 12
    # The header and one row for each rank.
    assert list(shortened(lines)) == [*lines[:9], f"… {len(lines) - 9} more lines: print(parallel.compiled.order)"]
    assert list(shortened(lines[:9])) == lines[:9]
    two = str(generate("1f1b", 2, 64)).splitlines()
    assert list(shortened(two))[:-1] == two[:12] and two[12] == ""


def test_the_update_is_of_the_rank_that_holds_most() -> None:
    compiled = interleaved_pipe().compiled
    found = StepOnPaper(compiled.program, compiled.cost, compiled.order)
    whole = sum(
        compiled.cost.parameter(item.dims, item.dtype, item.sharding).seconds for item in compiled.program.signature.inputs_of("parameter")
    )
    assert whole / 2 <= found.update_seconds < whole
    assert found.seconds == pytest.approx(found.simulation.step_seconds + found.update_seconds)


def test_a_tensor_more_costs_an_update_and_a_handover_of_its_own() -> None:
    compiled = interleaved_pipe().compiled
    device = compiled.cost.cluster.device
    host = Host(parameter_seconds=1.0, update_seconds=10.0, update_bandwidth=device.memory_bandwidth / 2)
    cost = CostModel(replace(compiled.cost.cluster, device=replace(device, host=host)), compiled.cost.mesh)
    bare, found = (StepOnPaper(compiled.program, each, compiled.order) for each in (compiled.cost, cost))
    number = found.handover_seconds
    assert number == round(number) and 0 < number < len(compiled.program.signature.inputs_of("parameter"))
    assert bare.handover_seconds == 0.0 and found.update_seconds == pytest.approx(10 * number + 2 * bare.update_seconds)
    assert found.seconds == pytest.approx(found.simulation.step_seconds + 11 * number, rel=1e-3)
