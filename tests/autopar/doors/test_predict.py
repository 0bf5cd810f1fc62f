"""The door to predictions: what it says grows as it should, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.doors.predict import measure_work
from autopar.errors import AutoparError, InputError, MeshError, PlanError
from autopar.foresight.work import ModelWork
from benchmarks.published_models import GPT


@pytest.fixture(scope="module")
def work() -> ModelWork:
    with torch.device("meta"):
        model, tokens = GPT(96, 6, 32, 4, 16), torch.zeros(2, 16, dtype=torch.int64)
    return measure_work(model, {"tokens": tokens, "labels": tokens}, "8xA100")


def predicted(work: ModelWork, **changes: Any) -> autopar.Prediction:
    options: dict[str, Any] = {"cluster": "8xA100", "mesh": {"dp": 2}, "global_batch": 16, "microbatch": 2} | changes
    return autopar.predict(work, **options)


def test_a_step_is_the_sum_of_its_parts_and_prints(work: ModelWork) -> None:
    found = predicted(work)
    assert found.step_seconds == pytest.approx(sum(found.seconds.values()))
    assert found.num_microbatches == 4
    assert found.fits
    assert "dp2" in str(found)
    assert found.to_dict()["step_seconds"] == found.step_seconds


def test_the_model_can_be_given_itself_and_its_data_stays_where_it_is() -> None:
    model, tokens = GPT(96, 3, 32, 4, 16), torch.zeros(2, 16, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens}
    found = autopar.predict(model, cluster="8xH100", mesh={"tp": 2}, global_batch=2, example_inputs=batch)
    assert found.step_seconds > 0
    assert len(model.blocks) == 3
    assert next(model.parameters()).dtype == torch.float32


def test_more_work_takes_longer_and_more_memory(work: ModelWork) -> None:
    base = predicted(work)
    assert predicted(work, global_batch=32).step_seconds > base.step_seconds
    assert predicted(work, recompute="full").step_seconds > predicted(work, recompute="selective").step_seconds > base.step_seconds
    assert predicted(work, recompute="full").memory[0].activations < base.memory[0].activations
    assert predicted(work, microbatch=4).memory[0].activations == pytest.approx(2 * base.memory[0].activations, rel=0.01)
    assert predicted(work, zero=1).memory[0].optimizer_state == base.memory[0].optimizer_state / 2


def test_a_pipeline_has_a_bubble_that_more_microbatches_shrink(work: ModelWork) -> None:
    few = predicted(work, mesh={"pp": 2}, global_batch=8)
    many = predicted(work, mesh={"pp": 2}, global_batch=64)
    assert len(few.memory) == 2
    assert few.seconds["bubble"] / few.step_seconds > many.seconds["bubble"] / many.step_seconds > 0
    chunked = predicted(work, mesh={"pp": 2}, global_batch=8, schedule="interleaved", num_chunks=3)
    assert chunked.schedule == "interleaved"


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"cluster": "a100:4", "mesh": {"dp": 8}}, MeshError, "has 8 ranks, the cluster 4 devices: take dp = 4"),
        ({"cluster": "a100:many"}, MeshError, "is no number of devices"),
        ({"global_batch": 12, "microbatch": 4}, InputError, "microbatch may be 1, 2, 3, 6"),
        ({"global_batch": 3}, InputError, "global_batch may be 4"),
        ({"mesh": {"ep": 2}}, MeshError, "pp, dp and tp, not ep"),
        ({"mesh": {"pp": 8}}, PlanError, "8 stages want a layer each, and the model has 6"),
        ({"recompute": "some"}, PlanError, "use none, selective, full"),
        ({"zero": 4}, PlanError, "use 0, 1, 2 or 3"),
        ({"num_chunks": 2}, PlanError, 'wants schedule="interleaved"'),
        ({"schedule": "zigzag", "mesh": {"pp": 2}}, AutoparError, "no schedule is called 'zigzag'"),
        ({"profile": "fast"}, AutoparError, "profile='fast' is unknown: use fused"),
    ],
)
def test_bad_input_is_refused_with_what_would_work(work: ModelWork, changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text.replace("(", r"\(")):
        predicted(work, **changes)


def test_one_sample_cannot_be_told_from_a_length() -> None:
    with pytest.raises(InputError, match="pass 2 or more"):
        measure_work(torch.nn.Linear(4, 4), (torch.zeros(1, 4),), "8xA100")
