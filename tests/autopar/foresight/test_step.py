"""Of a step's parts those that follow from what the software does and from how many nodes there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.foresight.constants import SoftwareProfile
from autopar.foresight.prediction import Prediction
from autopar.foresight.work import ModelWork
from autopar.predictor import measure_work, step_of
from benchmarks.published_models import GPT


@pytest.fixture(scope="module")
def work() -> ModelWork:
    with torch.device("meta"):
        model, tokens = GPT(512, 4, 256, 4, 64), torch.zeros(2, 64, dtype=torch.int64)
    return measure_work(model, {"tokens": tokens, "labels": tokens}, "8xH100")


def predicted(work: ModelWork, dp: int, zero: int, **software: Any) -> Prediction:
    profile = replace(SoftwareProfile.named("eager"), **software)
    return step_of(work, cluster="8xH100", mesh={"dp": dp}, global_batch=8 * dp, microbatch=8, zero=zero, profile=profile).prediction()


@pytest.mark.parametrize(("when", "hides"), [("always", (True, True)), ("without zero", (True, False)), ("never", (False, False))])
def test_sums_of_gradients_hide_behind_the_backward_where_the_software_lets_them(
    work: ModelWork, when: str, hides: tuple[bool, bool]
) -> None:
    plain, other = ([predicted(work, 8, zero, overlaps_gradients=each).seconds["gradients"] for zero in (0, 1)] for each in ("never", when))
    assert tuple(now < before for before, now in zip(plain, other, strict=True)) == hides


def test_a_step_waits_for_the_slowest_node_longer_with_every_doubling(work: ModelWork) -> None:
    found = [predicted(work, dp, 0, doubling_seconds=0.01).seconds["nodes"] for dp in (8, 16, 64)]
    assert found == pytest.approx([0.0, 0.01, 0.03])
    assert predicted(work, 64, 0).seconds["nodes"] == 0.0


def test_what_starts_a_collective_grows_with_every_doubling_of_the_nodes(work: ModelWork) -> None:
    """By as much each time, as levels of a tree do."""
    two, four, eight = (
        step_of(work, cluster="8xH100", mesh={"dp": dp}, global_batch=dp).prices.collective("all_gather", ("dp",), 0.0, 0.0)
        for dp in (16, 32, 64)
    )
    near = 7 * 5.5e-6  # of ranks on a node, for each node
    assert four - two - 2 * near == pytest.approx(eight - four - 4 * near)
