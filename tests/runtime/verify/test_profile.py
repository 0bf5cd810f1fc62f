"""Steps measured instruction by instruction, beside the cost model: on virtual ranks and on gloo."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.pipeline.exposure import Interval
from autopar.runtime.verify.profile import Profile
from tests.support.schedules import schedule_of, whole


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


BATCH = torch.ones(8, 32)


@pytest.fixture(scope="module")
def found() -> Profile:
    torch.manual_seed(0)
    parallel = autopar.compile(Net(), autopar.virtual_mesh(dp=2), backend="eager", cluster="a100", zero=3, example_inputs=(BATCH,))
    return parallel.profile(BATCH, steps=2)


def test_every_instruction_of_every_rank_and_step_is_measured(found: Profile) -> None:
    assert len(found.steps) == 2
    for step in found.steps:
        assert set(step) == {0, 1}
        for rank, row in step.items():
            instructions = found.program.schedule_of(rank).instructions
            assert [each.number for each in row] == [n for n, each in enumerate(instructions) if str(each) != "PAUSE"]
            assert all(each.seconds >= 0 for each in row)
            assert all(one.end <= other.begin + 1e-9 for one, other in zip(row, row[1:], strict=False))


def test_prints_what_it_found_beside_what_was_expected(found: Profile) -> None:
    text = str(found)
    assert "measured step: " in text and "the median of 2" in text and "virtual ranks take turns" in text
    assert "on paper: " in text and "contractions" in text
    assert found.fragments[0].name in text
    assert found.fragments[0].seconds == max(each.seconds for each in found.fragments)
    assert found.predicted_exposure is not None and 0 < found.predicted_exposure.exposed_share < 1


def test_the_trace_shows_measured_and_predicted_streams(found: Profile, tmp_path: Path) -> None:
    found.write(tmp_path / "trace.json")
    items = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {item["args"]["name"] for item in items if item["name"] == "process_name"}
    assert processes == {"rank 0 measured", "rank 1 measured", "rank 0 predicted"}  # on paper ranks of one place are alike
    streams = {item["args"]["name"] for item in items if item["name"] == "thread_name"}
    assert {"compute", "launch", "wait", "under way over dp"} <= streams


def test_less_than_one_step_is_refused() -> None:
    parallel = autopar.compile(Net(), autopar.virtual_mesh(dp=1), backend="eager")
    with pytest.raises(AutoparError, match=r"profile\(steps=0\): at least one step is measured"):
        parallel.profile(BATCH, steps=0)


@pytest.mark.parametrize(
    ("text", "ends", "took"),
    [
        ("LAUNCH all_reduce sum dp (x) -> a\nWAIT a", (1.0, 5.0), 5.0),
        ("LAUNCH all_reduce sum dp (x) -> a\nRUN f (x) -> (y)\nWAIT a", (1.0, 20.0, 21.0), None),
        ("LAUNCH all_reduce sum dp (x) -> a\nLAUNCH all_reduce sum dp (x) -> b\nWAIT a\nWAIT b", (1.0, 2.0, 5.0, 9.0), 5.0 + 4.0),
    ],
)
def test_a_collective_counts_from_its_launch_or_the_end_of_the_one_before(text: str, ends: tuple[float, ...], took: float | None) -> None:
    """One that was over before its wait began is of unknown length and left out."""
    program = whole(Mesh((("dp", 1),)), schedule_of(text, "x", f=lambda x: x + 1))
    row = tuple(Interval(number, begin, end) for number, (begin, end) in enumerate(pairwise((0.0, *ends))))
    found = Profile(program, ({0: row},), is_virtual=False, seconds=lambda each: 1.0).classes
    assert found.get("all_reduce dp", (None,))[0] == took


def profiles_a_pipeline() -> tuple[str, float, float, dict[str, tuple[float, float]]]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    parallel = autopar.compile(Net(), mesh, backend="eager", num_microbatches=2, example_inputs=(BATCH[:4],))
    found = parallel.profile(BATCH[:4], steps=2)
    return str(found), found.measured_exposure.exposed_share, found.measured_exposure.bubble_share, found.classes


def test_processes_say_what_is_exposed_and_what_idles(gloo_ranks: Any) -> None:
    for text, exposed, bubble, classes in gloo_ranks.run(profiles_a_pipeline):
        assert 0 <= exposed < 1 and 0 < bubble < 1
        assert "waits for collectives" in text and "for other stages" in text
        assert classes["contractions"][0] > 0 and classes["contractions"][1] > 0
