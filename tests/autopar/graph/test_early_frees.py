"""Where memory is short a backward is cut behind the last reader of what was saved, and that is freed there."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.ir.instructions import Free, Run
from autopar.passes.default_passes import default_passes
from autopar.passes.schedule.write_actions import WriteActions
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.captures import compiled
from tests.support.models.residual import Residual, batch


@cache
def residual(frees_early: bool, num_blocks: int = 2) -> ParallelModule:
    def passes(*args, **kwargs):  # type: ignore[no-untyped-def]
        return tuple(WriteActions(frees_early) if isinstance(each, WriteActions) else each for each in default_passes(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.compiler.default_passes", passes)
        torch.manual_seed(0)
        return compiled(Residual(num_blocks).double(), {"dp": 1}, batch())


def frees(parallel: ParallelModule) -> list[tuple[str, ...]]:
    (schedule,) = parallel.compiled.schedules
    return [each.buffers for each in schedule.instructions if isinstance(each, Free)]


def runs(parallel: ParallelModule) -> list[Run]:
    (schedule,) = parallel.compiled.schedules
    return [each for each in schedule.instructions if isinstance(each, Run)]


def test_a_layer_is_not_held_until_its_backward_is_over() -> None:
    late, early = frees(residual(False)), frees(residual(True))
    assert max(map(len, early)) < max(map(len, late))
    assert {name for each in late for name in each} <= {name for each in early for name in each}


def test_the_peak_is_lower_and_is_what_the_allocator_says() -> None:
    (ids,) = batch()
    late, early = (residual(each).memory(measure=(ids,)) for each in (False, True))
    assert early.peak_bytes <= 0.95 * late.peak_bytes
    tracked = [max(each.tracked_bytes for each in found.measured.values()) for found in (late, early)]
    assert tracked[0] - tracked[1] == pytest.approx(late.peak_bytes - early.peak_bytes, rel=0.01)


def test_gradients_are_the_same() -> None:
    found = []
    for frees_early in (False, True):
        parallel = residual(frees_early)
        parallel.zero_grad()
        parallel(*batch()).backward()
        found.append([parameter.grad for parameter in parallel.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert residual(True).verify(*batch())


def test_equal_layers_are_cut_alike() -> None:
    """More of them give no more fragments."""
    three, five = (runs(residual(True, each)) for each in (3, 5))
    assert len(five) > len(three)
    assert len({each.fragment for each in five}) == len({each.fragment for each in three})
