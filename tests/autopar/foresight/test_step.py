"""Of a step's parts those that follow from what the software does and from how many nodes there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost.hardware.cluster import Cluster
from autopar.doors.measure_work import measure_work
from autopar.doors.predict import step_of
from autopar.doors.rank_plans import rank_plans
from autopar.foresight.constants import SoftwareProfile
from autopar.foresight.prediction import Prediction
from autopar.foresight.step import Step
from autopar.foresight.work import ModelWork
from benchmarks.published_gpts import gpt
from benchmarks.published_models import GPT

TP = 8


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


@pytest.fixture(scope="module")
def split_work() -> ModelWork:
    """Of a published size, split over tp, and by positions between the products."""
    return gpt(6144, 64, 3, 2048, TP, splits_sequence=True)


def on_ranks(work: ModelWork, number: int = 1, pp: int = 1, schedule: str = "1f1b", **software: Any) -> Step:
    profile = replace(SoftwareProfile.named("eager"), **software)
    mesh = {"pp": pp, "tp": TP}
    return step_of(work, cluster="8xA100", mesh=mesh, global_batch=number, schedule=schedule, profile=profile)


def test_collectives_of_the_backward_hide_their_bytes_behind_products(split_work: ModelWork) -> None:
    """As much as the products of the weight gradients take at most; the parts sum up to the step all the same."""
    none, sums, every = (on_ranks(split_work, overlaps_tp=which).prediction() for which in ("", "sums", "all"))
    assert every.step_seconds <= sums.step_seconds < none.step_seconds
    hideable = [on_ranks(split_work, overlaps_tp=which).seconds("input_gradient", 0).hideable for which in ("", "sums", "all")]
    assert 0 == hideable[0] < hideable[1] < hideable[2]
    products = sum(on_ranks(split_work).of(block, "weight_gradient", 1).products for block in split_work.expanded())
    hidden = none.step_seconds - every.step_seconds
    assert hidden <= products * (1 + 1e-9)
    assert none.seconds["tensor_parallel"] - every.seconds["tensor_parallel"] == pytest.approx(hidden)
    assert all(none.seconds[part] == pytest.approx(every.seconds[part]) for part in ("products", "memory", "launches", "gradients"))


def test_a_backward_in_halves_hides_nothing(split_work: ModelWork) -> None:
    """Weight gradients run later there."""
    plain, halves = (
        [on_ranks(split_work, 4, 2, schedule, overlaps_tp=which).prediction().seconds["tensor_parallel"] for which in ("", "all")]
        for schedule in ("1f1b", "zb-h1")
    )
    assert plain[1] < plain[0] and halves[1] == halves[0]


def test_a_bound_of_the_search_holds_where_collectives_hide(split_work: ModelWork) -> None:
    profile = replace(SoftwareProfile.named("eager"), overlaps_tp="all")
    found = rank_plans(
        {TP: split_work}, cluster="8xA100", num_devices=16, global_batch=16, tp=[TP], profile=profile, schedule="1f1b", recompute="none"
    )
    assert found.plans and all(found.bound_seconds <= plan.prediction.step_seconds for plan in found.plans)


def test_gradients_of_whole_parameters_are_summed_over_tp_once_a_step(split_work: ModelWork) -> None:
    """Norms read a part of the positions on each rank: their gradients are sums, in one collective however many microbatches there are."""
    layer = next(block for block in split_work.blocks if block.is_layer)
    assert {each.collective for each in layer.gradient_sums} == {"all_reduce"} and len(layer.gradient_sums) >= 4  # two norms
    one, four = on_ranks(split_work), on_ranks(split_work, 4)
    assert one.prediction().seconds["gradients"] == four.prediction().seconds["gradients"] == one.sum_seconds(0) > 0
    size = sum(each.input.fixed for block in split_work.expanded() for each in block.gradient_sums)
    assert one.sum_seconds(0) == one.prices.collective("all_reduce", ("tp",), size, size)


def test_what_is_gathered_is_held_ahead_without_a_pipeline_as_far_as_there_is_room(split_work: ModelWork) -> None:
    def working(pp: int, holds_ahead: bool, cluster: Cluster | None = None) -> tuple[float, float]:
        step = on_ranks(split_work, 2, pp, keeps_gathered=False, holds_ahead=holds_ahead)
        if cluster is not None:
            step = replace(step, prices=replace(step.prices, cluster=cluster))
        return step.memory(0).working, step.memory(0).total

    plain, ahead = working(1, False), working(1, True)
    gathered = on_ranks(split_work).gathered_bytes(0)
    assert gathered > 0 and ahead[0] - plain[0] == pytest.approx(gathered)
    assert working(2, True) == working(2, False)
    device = Cluster.named("8xA100").device
    small = replace(Cluster.named("8xA100"), device=replace(device, memory_bytes=plain[1] + 1000))
    assert working(1, True, small)[1] == plain[1] + 1000
