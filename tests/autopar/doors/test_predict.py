"""The door to predictions: what it says grows as it should, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.doors.measure_work import measure_work
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


class Recurrent(torch.nn.Module):
    """Predicts the next symbol of [length, batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.out = torch.nn.Embedding(32, 16), torch.nn.RNN(16, 16), torch.nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.out(self.rnn(self.table(x[:-1]))[0])
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), x[1:].flatten())


class BatchFirst(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(0, 1))


def test_samples_are_counted_by_the_dim_that_is_said() -> None:
    options: dict[str, Any] = {"cluster": "8xA100", "mesh": {"dp": 2}, "global_batch": 8}
    first = autopar.predict(BatchFirst(), example_inputs=(torch.zeros(4, 9, dtype=torch.int64),), **options)
    inputs = (torch.zeros(9, 4, dtype=torch.int64),)
    last = autopar.predict(Recurrent(), example_inputs=inputs, batch_dims=1, **options)
    assert last.flops == first.flops and last.memory == first.memory
    assert autopar.predict(Recurrent(), example_inputs={"x": inputs[0]}, batch_dims={"x": 1}, **options) == last
    with pytest.raises(PlanError, match="mixes samples"):  # by the first dim those are positions
        autopar.predict(Recurrent(), example_inputs=inputs, **options)
    with pytest.raises(InputError, match="batch_dims names 'y', which is no input of this call"):
        autopar.predict(Recurrent(), example_inputs=inputs, batch_dims={"y": 1}, **options)


@pytest.mark.parametrize("samples", [2, 3, 5, 9])
def test_whether_samples_mix_is_asked_of_microbatches_that_divide_them(samples: int) -> None:
    normed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    assert measure_work(normed, (torch.zeros(samples, 4),), "8xA100").mixes_samples
    assert not measure_work(normed.eval(), (torch.zeros(samples, 4),), "8xA100").mixes_samples


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).square().mean() + (y * self.scale).square().mean()

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))


def test_samples_that_no_number_of_microbatches_divides_stay_together() -> None:
    def mixes(*lengths: int) -> bool:
        return measure_work(Two(), tuple(torch.zeros(length, 4) for length in lengths), "8xA100", batch_dims=0).mixes_samples

    assert not mixes(2, 4) and not mixes(3, 6) and mixes(2, 3)


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16", 2), ("float32", 4)])
def test_the_state_is_that_of_the_optimizer(precision: str, itemsize: int) -> None:
    def state(**changes: Any) -> float:
        found = autopar.predict(
            torch.nn.Linear(16, 16), cluster="8xA100", mesh={"dp": 1}, global_batch=2, example_inputs=(torch.zeros(2, 16),),
            precision=precision, **changes,
        )  # fmt: skip
        return found.memory[0].optimizer_state / (16 * 16 + 16)

    masters = 4 if itemsize == 2 else 0
    assert state() == state(optimizer="adamw") == 8 + masters
    assert state(optimizer="sgd") == masters and state(optimizer=torch.optim.Adagrad) == 4 + masters
    with pytest.raises(AutoparError, match="optimizer='best' is unknown"):
        state(optimizer="best")


def test_microbatches_that_compute_something_else_are_refused() -> None:
    normed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    options: dict[str, Any] = {
        "cluster": "8xA100", "mesh": {"dp": 2}, "global_batch": 8, "example_inputs": (torch.zeros(4, 4),)
    }  # fmt: skip
    with pytest.raises(PlanError, match=r'computes something else in 4 microbatches: pass microbatch=4, .* or microbatch_statistics="own"'):
        autopar.predict(normed, **options)
    assert autopar.predict(normed, microbatch=4, **options).num_microbatches == 1
    assert autopar.predict(normed, microbatch_statistics="own", **options).num_microbatches == 4


def test_samples_are_split_over_dp_alone() -> None:
    with pytest.raises(PlanError, match="predictions split samples over dp alone"):
        measure_work(torch.nn.Linear(4, 4), (torch.zeros(2, 4),), "8xA100", 2, {"batch": ("dp", "tp")})
