"""What to change of a plan that does not fit: each change saves and costs what `predict` says, and the first are the cheapest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.doors.measure_work import measure_work
from autopar.doors.predict import step_of
from autopar.foresight.changes import until_saved
from autopar.foresight.step import Step
from autopar.foresight.work import ModelWork
from benchmarks.published_models import GPT

BOTH = autopar.Offload(activations="host", optimizer="host")


@pytest.fixture(scope="module")
def works() -> dict[int, ModelWork]:
    with torch.device("meta"):
        model, tokens = GPT(512, 4, 256, 4, 64), torch.zeros(2, 64, dtype=torch.int64)
    return {tp: measure_work(model, {"tokens": tokens, "labels": tokens}, "8xA100", tp) for tp in (1, 2)}


def step(works: dict[int, ModelWork], **changes: Any) -> Step:
    options: dict[str, Any] = {"cluster": "8xA100", "mesh": {"dp": 8}, "global_batch": 64, "microbatch": 4} | changes
    return step_of(works[1], **options)


def test_each_saves_and_costs_what_it_says(works: dict[int, ModelWork]) -> None:
    before = step(works)
    found = until_saved(before, works, 0.9 * before.prediction().peak_bytes)
    assert len(found) >= 2
    for change in found:
        after = change.step.prediction()
        assert after.peak_bytes == pytest.approx(before.prediction().peak_bytes - change.saved_bytes)
        assert after.step_seconds == pytest.approx(before.prediction().step_seconds + change.added_seconds)
        assert change.saved_bytes > 0 and change.step.prediction().samples == before.prediction().samples == 64
        before = change.step
    assert " less, " in str(found[0])


def test_one_change_that_is_enough_is_the_cheapest_of_these(works: dict[int, ModelWork]) -> None:
    before = step(works)
    few = until_saved(before, works, 0.02 * before.prediction().peak_bytes)
    assert len(few) == 1
    recomputed = step(works, recompute="full").prediction()
    assert recomputed.peak_bytes < before.prediction().peak_bytes
    assert few[0].added_seconds < recomputed.step_seconds - before.prediction().step_seconds


def test_what_fits_wants_no_change_and_what_nothing_saves_gets_none(works: dict[int, ModelWork]) -> None:
    assert until_saved(step(works), works, -1.0) == []
    least = step(works, mesh={"tp": 1}, global_batch=1, microbatch=1, recompute="full", offload=BOTH)
    assert until_saved(least, works, 1e12) == []
