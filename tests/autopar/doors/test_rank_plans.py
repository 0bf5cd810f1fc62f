"""The search for plans: what it returns is the best of all that there are, and what is missing is missing for a reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import autopar
from autopar.doors.measure_work import measure_work
from autopar.errors import AutoparError, InputError, MeshError, PlanError
from autopar.foresight.search import Search
from autopar.foresight.work import ModelWork
from benchmarks.published_models import GPT

EXACT = 1e-12


@pytest.fixture(scope="module")
def works() -> dict[int, ModelWork]:
    with torch.device("meta"):
        model, tokens = GPT(512, 4, 256, 4, 64), torch.zeros(2, 64, dtype=torch.int64)
    return {tp: measure_work(model, {"tokens": tokens, "labels": tokens}, "8xA100", tp) for tp in (1, 2)}


def ranked(works: dict[int, ModelWork], **changes: Any) -> autopar.RankedPlans:
    options: dict[str, Any] = {"cluster": "8xA100:8", "global_batch": 16, "tp": (1, 2)} | changes
    return autopar.rank_plans(works, **options)


def every_prediction(works: dict[int, ModelWork], capacity: float) -> dict[str, float]:
    """The least seconds of each mesh, all plans predicted one by one."""
    found: dict[str, float] = {}
    for tp, pp in ((tp, pp) for tp in works for pp in (1, 2, 4)):
        dp = 8 // (tp * pp)
        for microbatch in (1, 2, 4, 8, 16):
            if 16 // dp % microbatch:
                continue
            number = 16 // dp // microbatch
            schedules = [("1f1b", 1)] + ([("zb-h1", 1)] if pp > 1 else []) + ([("zb-v", 1)] if pp == 2 else [])
            schedules += [("interleaved", 2)] if pp == 2 and number % 2 == 0 else []
            for schedule, chunks in schedules:
                for recompute in ("none", "selective", "full"):
                    for zero in range(4) if dp > 1 else (0,):
                        one = autopar.predict(
                            works[tp], cluster="8xA100", mesh={"pp": pp, "dp": dp, "tp": tp}, global_batch=16, microbatch=microbatch,
                            schedule=schedule, num_chunks=chunks, recompute=recompute, zero=zero,
                        )  # fmt: skip
                        if one.peak_bytes <= capacity:
                            key = f"{pp} {dp} {tp}"
                            found[key] = min(found.get(key, math.inf), one.step_seconds)
    return found


@pytest.mark.parametrize("share", [1.0, 0.45])
def test_each_mesh_has_its_fastest_plan_that_fits(works: dict[int, ModelWork], share: float) -> None:
    """Nothing that the bounds leave out is better; with less memory too."""
    most = max(plan.prediction.peak_bytes for plan in ranked(works).plans)
    found = ranked(works, memory=share * most)
    expected = every_prediction(works, share * most)
    got = {" ".join(str(size) for _, size in each.axes): each.prediction.step_seconds for each in found.plans}
    assert got == {mesh: pytest.approx(expected[mesh], rel=EXACT) for mesh in got}
    assert {mesh for mesh, seconds in expected.items() if seconds <= 2 * min(expected.values())} <= got.keys()
    seconds = [each.prediction.step_seconds for each in found.plans]
    assert seconds == sorted(seconds) and found.bound_seconds <= seconds[0]
    assert all(each.prediction.fits and each.prediction.peak_bytes <= share * most for each in found.plans)
    assert len(found.plans) + len(found.missing) == 7  # pp8 has more stages than layers
    assert dict(found.missing)["pp8"] == "more stages than the 4 layers of the model"


def test_less_memory_never_makes_it_faster_and_what_would_fit_is_said(works: dict[int, ModelWork]) -> None:
    free = ranked(works)
    tight = ranked(works, memory=0.6 * free.plans[0].prediction.peak_bytes)
    assert tight.plans[0].prediction.step_seconds >= free.plans[0].prediction.step_seconds
    assert any("memory is what limits it" in each for each in tight.advice)
    none = ranked(works, memory="1MB")
    assert not none.plans and "a device would have to hold" in none.advice[0] and "plans that fit on 0 meshes" in str(none)


def test_what_is_asked_for_is_kept_and_what_is_missing_has_its_reason(works: dict[int, ModelWork]) -> None:
    found = ranked(works, num_microbatches=2, schedule="1f1b", recompute="full", zero=1, global_batch=20)
    plans = {(each.plan.num_microbatches, each.plan.schedule, each.plan.recompute) for each in found.plans}
    assert plans == {(2, "1f1b", "full")} and {each.plan.zero for each in found.plans} <= {0, 1}
    assert "its dp does not divide a batch of 20" in dict(found.missing)["dp8"]
    tight = ranked(works, memory=0.6 * ranked(works).plans[0].prediction.peak_bytes)
    reasons = {reason for _, reason in tight.missing}
    assert all("a device would hold more" in each or "no plan fits" in each or "layers" in each or "2 times" in each for each in reasons)


def test_it_says_where_the_time_goes_and_what_the_others_lose(works: dict[int, ModelWork]) -> None:
    found = ranked(works)
    text = str(found)
    assert "where the time goes" in text and "the next best mesh" in text and "above the bound" in text
    assert "slower" in found.plans[1].reasons[1]
    values = json.loads(json.dumps(found.to_dict()))
    keys = {"mesh", "schedule", "num_microbatches", "zero", "recompute", "step_seconds", "mfu", "memory_bytes", "fits", "reasons"}
    assert keys <= values["plans"][0].keys()


def test_ctrl_c_gives_what_is_known(works: dict[int, ModelWork], monkeypatch: pytest.MonkeyPatch) -> None:
    look, seen = Search._on_mesh, []

    def interrupted(search: Search, axes: Any) -> Any:
        seen.append(axes)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return look(search, axes)

    monkeypatch.setattr(Search, "_on_mesh", interrupted)
    found = ranked(works)
    assert not found.is_complete and len(found.plans) == 2 and "stopped before" in str(found)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"cluster": "8xA100"}, MeshError, 'Write cluster="8xA100:128"'),
        ({"cluster": "8xA100:many"}, MeshError, "is no number of devices"),
        ({"cluster": "8xA100:0"}, MeshError, "'0' is no number of devices"),
        ({"num_devices": 4}, MeshError, "leave one of them out"),
        ({"global_batch": 0}, InputError, "1 or more"),
        ({"tp": (3,)}, MeshError, "does not divide 8 devices"),
        ({"tp": (8,)}, PlanError, "tp = 8 is asked for, and the works that were passed are of tp = 1, 2"),
        ({"memory": "much"}, AutoparError, "memory is 'much'"),
        ({"profile": "fast"}, AutoparError, "profile='fast' is unknown"),
        ({"cluster": "8xA1000:8"}, AutoparError, "no numbers for '8xA1000'; known are a100"),
        ({"num_microbatches": 0}, AutoparError, "num_microbatches=0 is no number of microbatches"),
        ({"num_microbatches": 2.5}, AutoparError, "num_microbatches=2.5 is no number of microbatches"),
        ({"zero": 7}, PlanError, "zero=7 is no level of ZeRO: use 0, 1, 2 or 3"),
        ({"schedule": "2f2b"}, PlanError, "schedule='2f2b' is unknown"),
        ({"recompute": "some"}, PlanError, "recompute='some' is unknown"),
    ],
)
def test_bad_questions_are_refused(works: dict[int, ModelWork], changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        ranked(works, **changes)
    assert text in str(caught.value)


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(4096, 4096) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(2, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(1, 2).flatten(2)).square().mean()


def test_what_is_split_over_a_part_of_tp_has_a_price() -> None:
    """Of two heads over eight ranks transfers go over sub-axes of tp, which another tp has in other sizes, or not at all."""
    with torch.device("meta"):
        model, x = TwoHeads(), torch.zeros(4, 4096, 4096)
    for tp in ((8,), (2, 4, 8)):
        found = autopar.rank_plans(model, cluster="8xH100", example_inputs=(x,), num_devices=8, global_batch=4, tp=tp)
        assert found.plans and all(plan.prediction.step_seconds > 0 for plan in found.plans)
