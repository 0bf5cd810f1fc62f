"""Prices of other pins: those of a fresh compile with them, or the refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pytest import approx
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from autopar.errors import AutoparError, PlanError, UnmatchedPinError
from autopar.reports.what_if import what_if
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.residual import WIDTH, WORDS, parallel_residual, piped, plain_pipe

PINS = {"blocks.*.mlp.up.weight": (None, "tp"), "blocks.*.mlp": (None, "tp", ...)}


@pytest.fixture(scope="module")
def parallel() -> ParallelModule:
    return parallel_residual(cluster="8xh100")


def test_equals_a_fresh_compile_with_these_pins(parallel: ParallelModule) -> None:
    found, fresh = parallel.what_if(PINS), parallel_residual(cluster="8xh100", pins=PINS)
    assert found.is_kept and found.plan == replace(fresh.plan, buckets={}, chunks=None), (
        "collectives are joined, or cut, later than shardings"
    )
    assert found.seconds == approx(fresh.compiled.search.cost_seconds) and found.seconds_now == approx(
        parallel.compiled.search.cost_seconds
    )
    assert found.memory == fresh.summary()["memory"] and found.memory_now == parallel.summary()["memory"]
    sent = {
        f"{axes} {name}": each["forward"] + each["backward"]
        for axes, kinds in fresh.summary()["communication"].items()
        for name, each in kinds.items()
    }
    assert found.communication == sent


def test_says_what_changes(parallel: ParallelModule) -> None:
    found = parallel.what_if(PINS)
    text = str(found)
    assert text.startswith("a step takes ") and "µs, now " in text
    assert found.seconds > found.seconds_now and found.diff
    assert "bytes a rank holds\n  parameters" in text and "bytes a rank sends in a step\n" in text
    assert "  blocks.*.mlp.up.weight   [64, 16] → [64, 16@tp]   × 2\n" in text
    assert "  forward blocks.*.mlp pinned 0   absent → dp:a0 tp:a1   × 2" in text


def test_no_pins_change_nothing_and_nothing_is_changed(parallel: ParallelModule) -> None:
    plan = parallel.plan
    found = parallel.what_if({})
    assert found.seconds == found.seconds_now and not found.diff and "what changes: the plans are the same" in str(found)
    assert parallel.plan is plan


def test_pins_are_taken_in_place_of_those_that_were_given(parallel: ParallelModule) -> None:
    pinned = parallel_residual(cluster="8xh100", pins=PINS)
    assert pinned.what_if({}).seconds == approx(parallel.compiled.search.cost_seconds)
    assert pinned.what_if({"batch": ("dp", "tp")}).seconds <= parallel.what_if({}).seconds_now


def test_a_refusal_is_an_answer(parallel: ParallelModule) -> None:
    found = parallel.what_if({"blocks.*.mlp.up.weight": ("ep", None)})
    assert not found.is_kept and found.plan is None and found.seconds == float("inf") and found.memory == {}
    assert str(found).startswith("refused: pins that cannot be kept:\n  'blocks.0.mlp.up.weight' ('ep', None): axis 'ep'")


@pytest.mark.parametrize("pin", [(None, "tp"), ColwiseParallel()], ids=["a tuple", "a style"])
def test_a_pin_that_names_nothing_raises_as_in_a_compile(parallel: ParallelModule, pin: Any) -> None:
    pins = {"blocks.*.mpl.up": pin}
    with pytest.raises(UnmatchedPinError, match=r"'blocks.\*.mpl.up' matches no (parameter|module); there are .*blocks"):
        parallel.what_if(pins)
    with pytest.raises(PlanError, match="matches no"):
        parallel_residual(pins=pins)


class Attending(nn.Module):
    """Reads ids as `Residual` does; each position attends to those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        heads = self.table(ids).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return nn.functional.cross_entropy(self.head(attended.transpose(1, 2).flatten(2)).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("make", [lambda: parallel_residual(Attending(), cluster="h100"), plain_pipe], ids=["kernels", "stages"])
def test_what_pins_do_not_touch_does_not_change(make: Callable[[], ParallelModule]) -> None:
    """Kernels and the order of a pipeline are part of the plan."""
    parallel = make()
    assert parallel.plan.kernels or parallel.plan.cuts
    assert "what changes: the plans are the same" in str(parallel.what_if({}))
    found = parallel.what_if({"head.weight": ("dp" if parallel.plan.cuts else "tp", None)})
    assert found.diff.parameters and not found.diff.kernels and not found.diff.pipeline
    assert found.plan is not None and found.plan.schedule == parallel.plan.schedule


def test_a_program_that_nobody_searched_is_refused(parallel: ParallelModule) -> None:
    with pytest.raises(AutoparError, match="not made by autopar.compile"):
        what_if(parallel.compiled.with_forms(decide_again=None), {})


@pytest.mark.parametrize("options", [{"pp": 2}, {"pp": 1}])
def test_of_a_pipeline_a_step_is_what_it_takes_on_paper(options: dict[str, int]) -> None:
    piped_now, pins = piped(**options), {"blocks.*.mlp.up.weight": (None, "dp")}
    found, fresh = piped_now.what_if(pins), piped(**options, pins=pins)
    assert found.is_kept
    for seconds, parallel in ((found.seconds, fresh), (found.seconds_now, piped_now)):
        pipeline = parallel.summary()["pipeline"]
        assert seconds == pytest.approx(pipeline["step_seconds"] + pipeline["update_seconds"])
    assert found.memory == fresh.summary()["memory"]
    assert found.communication.get("pp send", 0) == sum(
        entry["forward"] + entry["backward"] for entry in fresh.summary()["communication"].get("pp", {}).values()
    )
    assert "a step takes " in str(found)
