"""What lies on the host, on paper: what that saves of a device's memory, what it costs, and which plans the search finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.links import Link
from autopar.doors.measure_work import measure_work
from autopar.doors.predict import step_of
from autopar.doors.rank_plans import rank_plans
from autopar.errors import AutoparError, PlanError
from autopar.foresight.constants import SoftwareProfile
from autopar.foresight.offload import HOST_BANDWIDTH, KINDS, NOTHING
from autopar.foresight.step import Step
from autopar.foresight.work import ModelWork
from benchmarks.published_models import GPT

BOTH = autopar.Offload(activations="host", optimizer="host")
EXACT = 1e-9


@pytest.fixture(scope="module")
def works() -> dict[int, ModelWork]:
    with torch.device("meta"):
        model, tokens = GPT(512, 4, 256, 4, 64), torch.zeros(2, 64, dtype=torch.int64)
    return {tp: measure_work(model, {"tokens": tokens, "labels": tokens}, "8xH100", tp) for tp in (1, 2)}


def step(works: dict[int, ModelWork], **changes: Any) -> Step:
    options: dict[str, Any] = {"cluster": "8xH100", "mesh": {"pp": 2, "dp": 4}, "global_batch": 64, "microbatch": 4} | changes
    return step_of(works[1], **options)


def linked(bytes_per_second: float) -> Cluster:
    return replace(Cluster.named("8xH100"), copies=(("host", Link(0.0, bytes_per_second, "for a test")),))


def test_the_optimizers_state_is_gone_from_the_device_and_updates_at_the_hosts_speed(works: dict[int, ModelWork]) -> None:
    here, away = (step(works, zero=1, offload=asked).prediction() for asked in (None, "optimizer"))
    for one, other in zip(here.memory, away.memory, strict=True):
        assert other.optimizer_state == 0.0 and other.host == one.optimizer_state > 0
        assert one.total - other.total == pytest.approx(one.optimizer_state)
    profile = SoftwareProfile.named("fused")
    count = max(step(works).counts) / 4  # parts of four ranks
    passes = count * (profile.gradient_bytes + 2 * profile.state_bytes + 2)
    assert away.seconds["update"] == pytest.approx(20e-6 + passes / HOST_BANDWIDTH)
    others = set(here.seconds) - {"update"}
    assert all(here.seconds[part] == away.seconds[part] for part in others)
    slow = step(works, cluster=linked(1e6), zero=1, offload="optimizer").prediction()
    assert slow.seconds["update"] == pytest.approx(count * profile.reduced_bytes / 1e6)  # gradients, in four bytes, take longest


def test_activations_are_gone_but_for_what_is_on_its_way_and_copies_that_do_not_hide_are_waited_for(works: dict[int, ModelWork]) -> None:
    here, free, slow = (
        step(works, **options).prediction()
        for options in ({}, {"offload": "activations", "cluster": linked(1e15)}, {"offload": "activations", "cluster": linked(1e9)})
    )
    for place, (one, other) in enumerate(zip(here.memory, free.memory, strict=True)):
        staging = step(works).staging_bytes(place)
        assert other.activations == pytest.approx(staging) and other.host == pytest.approx(one.activations) and staging < one.activations
    assert here.seconds["copies"] == free.seconds["copies"] == 0.0
    assert free.step_seconds == pytest.approx(here.step_seconds)
    assert slow.seconds["copies"] > 0
    longest = max(stage.saved_bytes for stage in here.stages) / 1e9
    assert slow.step_seconds == pytest.approx(sum(slow.seconds.values())) and slow.step_seconds > 2 * longest * here.num_microbatches
    for stage, other in zip(here.stages, slow.stages, strict=True):
        copy = stage.saved_bytes / 1e9  # a link without latency
        assert other.forward == pytest.approx(max(stage.forward, copy))
        assert other.backward == pytest.approx(max(stage.backward, copy))


def best_of_all(works: dict[int, ModelWork], capacity: float, cluster: Cluster) -> float:
    """Of every plan, one by one, with as much of the activations away as makes it fit."""
    found = float("inf")
    for tp, pp in ((tp, pp) for tp in works for pp in (1, 2)):
        dp = 4 // (tp * pp)
        for number in (each for each in (1, 2, 4, 8, 16) if 16 // dp % each == 0):
            names = ("1f1b",) if pp == 1 else ("1f1b", "zb-h1", "zb-v", *(("interleaved",) if number % pp == 0 else ()))
            for schedule in names:
                for recompute in ("none", "selective", "full"):
                    for zero in range(4) if dp > 1 else (0,):
                        for asked in (None, "optimizer", "activations", BOTH):
                            one = step_of(
                                works[tp], cluster, {"pp": pp, "dp": dp, "tp": tp}, 16, microbatch=16 // dp // number, schedule=schedule,
                                num_chunks=2 if schedule == "interleaved" else 1, recompute=recompute, zero=zero, offload=asked,
                            )  # fmt: skip
                            if one.plan.moves_activations:
                                share = one.without_copies.share_that_fits(zero, capacity)
                                one = replace(one, plan=replace(one.plan, offloaded_share=share))
                            if one.peak_bytes(zero) <= capacity:
                                found = min(found, one.prediction().step_seconds)
    return found


@pytest.mark.parametrize("share", [0.3, 0.2])
def test_the_search_finds_the_best_of_plans_with_and_without(works: dict[int, ModelWork], share: float) -> None:
    cluster = linked(100e9)
    options: dict[str, Any] = {"cluster": cluster, "num_devices": 4, "global_batch": 16, "tp": (1, 2)}
    most = rank_plans(works, **options, offload=None).plans[0].prediction.peak_bytes
    found = rank_plans(works, **options, memory=share * most, offload="auto")
    first = found.plans[0]
    assert first.prediction.step_seconds == pytest.approx(best_of_all(works, share * most, cluster), rel=EXACT)
    assert first.prediction.fits and found.bound_seconds <= first.prediction.step_seconds
    alone = rank_plans(works, **options, memory=share * most, offload=None)
    assert not alone.plans or first.prediction.step_seconds <= alone.plans[0].prediction.step_seconds


def test_what_fits_nowhere_else_goes_to_the_host_and_says_what_would_do_without(works: dict[int, ModelWork]) -> None:
    options: dict[str, Any] = {"cluster": "h100:1", "global_batch": 16, "tp": (1,)}
    least = rank_plans(works, **options, offload="optimizer", recompute="full").plans[0].prediction.peak_bytes
    found = rank_plans(works, **options, memory=1.01 * least)
    plan = found.plans[0]
    assert "optimizer" in plan.plan.offload and plan.prediction.fits
    assert not rank_plans(works, **options, memory=1.01 * least, offload=None).plans
    text = str(found)
    assert "on the host" in text and "compile with offload=autopar.Offload(" in text and "nothing fits with all on the devices" in text
    values = plan.to_dict()
    assert values["offload"].keys() == set(plan.plan.offload) and values["host_bytes"] > 0
    assert values["memory_bytes"][0]["total"] == plan.prediction.peak_bytes
    free = rank_plans(works, **options)
    assert all(each.plan.offload == NOTHING for each in free.plans) and "on the host" not in str(free)


def test_the_host_has_room_for_what_lies_there(works: dict[int, ModelWork]) -> None:
    options: dict[str, Any] = {"cluster": "h100:1", "global_batch": 16, "tp": (1,), "offload": "optimizer"}
    needed = rank_plans(works, **options).plans[0].prediction.host_bytes
    assert rank_plans(works, **options, host_memory=1.01 * needed).plans
    assert not rank_plans(works, **options, host_memory=0.99 * needed).plans
    with pytest.raises(AutoparError, match="host_memory"):
        rank_plans(works, **options, host_memory="much")


def test_only_what_was_asked_for_is_moved_and_nonsense_is_refused(works: dict[int, ModelWork]) -> None:
    options: dict[str, Any] = {"cluster": "h100:2", "global_batch": 16, "tp": (1, 2)}
    assert {each.plan.offload for each in rank_plans(works, **options, offload="optimizer").plans} == {("optimizer",)}
    state = autopar.Offload(optimizer="file", folder="/tmp")
    assert {each.plan.offload for each in rank_plans(works, **options, offload=state).plans} == {("optimizer",)}
    assert {each.plan.offload for each in rank_plans(works, **options, offload=BOTH).plans} <= {KINDS[2], ("optimizer",)}
    with pytest.raises(PlanError, match="offload='disk' is unknown: use needed, auto"):
        rank_plans(works, **options, offload="disk")
    with pytest.raises(PlanError, match="leaves open what lies on the host"):
        step(works, offload="auto")
