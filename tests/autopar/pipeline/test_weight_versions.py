"""Which version of its weights each microbatch takes: the delays of PipeDream and PipeDream-2BW, and orders that have no such ones."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.pipeline.schedules import gpipe, one_forward_one_backward
from autopar.pipeline.weight_versions import WeightVersions


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_stashed_versions_are_pipedreams(num_stages: int) -> None:
    """W(t + 1) = W(t) - nu grad f(W_1(t - n + 1), W_2(t - n + 2), ..., W_n(t)) from the n-th microbatch on."""
    order, asked = one_forward_one_backward(num_stages, 12), WeightVersions("stash")
    for stage in range(num_stages):
        delay = num_stages - 1 - stage
        assert asked.taken(stage, order) == tuple(max(number - delay, 0) for number in range(12))
        assert asked.staleness(stage, order) == delay


def test_updates_of_several_microbatches_are_less_stale() -> None:
    order, asked = one_forward_one_backward(4, 12), WeightVersions("stash", 2)
    assert [asked.staleness(stage, order) for stage in range(4)] == [2, 1, 1, 0]
    assert asked.taken(0, order) == (0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4)


def test_all_stages_of_2bw_are_one_update_behind() -> None:
    """W(t + 1) = W(t) - nu grad f(W(t - 1))."""
    order, asked = one_forward_one_backward(3, 12), WeightVersions("2bw")
    for stage in range(3):
        assert asked.taken(stage, order) == (0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2) and asked.staleness(stage, order) == 1


def test_what_is_impossible_is_refused() -> None:
    order = one_forward_one_backward(4, 8)
    with pytest.raises(PlanError, match="8 microbatches of a call are no whole number of updates"):
        WeightVersions("stash", 3).require(order)
    with pytest.raises(PlanError, match="two versions are too few for 4 stages.*say update_every=4"):
        WeightVersions("2bw", 2).require(order)
    with pytest.raises(PlanError, match="0F4 begins in the order 'gpipe' when stage 0 has made 0 updates of its weights"):
        WeightVersions("stash").taken(0, gpipe(4, 8))
