"""A measured step: every action once, in the order of the schedule, with what was held; nothing is changed by looking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import autopar
from autopar.runtime.verify.timeline import Timeline
from tests.support.models.zoo import gpt2

NUMBER = 4


@pytest.fixture(scope="module")
def parallel() -> autopar.ParallelModule:
    case = gpt2(1)
    mesh = autopar.virtual_mesh(pp=2)
    return autopar.compile(
        case.model, mesh, backend="eager", num_microbatches=NUMBER, schedule="zb-h1", cluster="a100", example_inputs=case.batch
    )


@pytest.fixture(scope="module")
def timeline(parallel: autopar.ParallelModule) -> Timeline:
    return parallel.timeline(**gpt2(1).batch)  # type: ignore[no-any-return]


def test_every_action_that_computes_is_measured_in_order(parallel: autopar.ParallelModule, timeline: Timeline) -> None:
    assert not parallel.compiled.order.is_single
    for rank, order in enumerate(parallel.compiled.order.orders):
        measured = [event.name for event in timeline.events if event.rank == rank and event.stream == "compute"]
        # The first stage has no gradients to send: its I is empty.
        assert measured == [str(action) for action in order if not (rank == 0 and action.kind == "I")]


def test_actions_of_a_rank_follow_each_other(timeline: Timeline) -> None:
    for rank in (0, 1):
        row = [event for event in timeline.events if event.rank == rank and event.stream == "compute"]
        assert all(event.start_seconds < event.end_seconds for event in row)
        assert all(one.end_seconds <= other.start_seconds for one, other in zip(row, row[1:], strict=False))
    assert timeline.step_seconds >= max(event.end_seconds for event in timeline.events)
    assert 0 <= timeline.bubble_rate < 1


def test_live_microbatches_are_those_of_the_simulation(timeline: Timeline) -> None:
    assert timeline.predicted is not None
    assert tuple(timeline.peak_live_microbatches.values()) == timeline.predicted.peak_live_microbatches


def test_the_trace_shows_both_side_by_side(timeline: Timeline, tmp_path: Path) -> None:
    timeline.write(tmp_path / "trace.json")
    items = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {item["args"]["name"] for item in items if item["name"] == "process_name"}
    assert names == {"rank 0 measured", "rank 0 predicted", "rank 1 measured", "rank 1 predicted"}
    assert {"0F0", "1I0", "1W3"} <= {item["name"] for item in items}


def test_prints_what_was_measured_beside_what_was_predicted(timeline: Timeline) -> None:
    text = str(timeline)
    assert "measured step" in text and "predicted" in text and "rank 1: at most" in text and "live microbatches" in text


def test_looking_changes_nothing() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).square().mean()

    options = {"backend": "eager", "num_microbatches": 2, "microbatch_statistics": "own"}
    parallel = autopar.compile(Loss(), autopar.virtual_mesh(pp=2), **options)
    before = {name: value.clone() for name, value in parallel.state_dict().items()}
    parallel.timeline(torch.randn(8, 4))
    assert all(torch.equal(value, before[name]) for name, value in parallel.state_dict().items())
    assert parallel.step == 0 and all(parameter.grad is None for parameter in parallel.parameters())


def test_one_microbatch_through_one_stage_is_a_step_as_any() -> None:
    """Its backward, which waits for gradients, is run, too."""
    case = gpt2(1)
    parallel = autopar.compile(case.model, autopar.virtual_mesh(dp=2), backend="eager", cluster="a100", example_inputs=case.batch)
    found = parallel.timeline(**case.batch)
    for rank in (0, 1):
        assert [event.name for event in found.events if event.rank == rank and event.stream == "compute"] == ["0F0", "0B0"]
    assert found.predicted is not None and [event.name for event in found.predicted.events][:2] == ["0F0", "0B0"]
    assert set(found.peak_live_microbatches.values()) == {1}
    assert all(parameter.grad is None for parameter in parallel.parameters())
