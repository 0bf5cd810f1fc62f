"""One pass of list scheduling keeps dependencies, memory and its policy."""

from __future__ import annotations

import math

import pytest

from autopar.ir.actions import PipelineSchedule
from autopar.pipeline.check import check_pipeline
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.list_schedule import Listed, OrderingProblem, Policy, list_schedule, natural_ahead, round_trips
from autopar.pipeline.simulate import simulate


def problem(num_ranks: int, num_microbatches: int, limit: float = math.inf, communication: float = 0.0) -> OrderingProblem:
    cost = PipelineCost.uniform(num_ranks, communication_seconds=communication, saved_bytes=3.0, weight_saved_bytes=1.0)
    return OrderingProblem(cost, tuple(range(num_ranks)), num_microbatches, (limit,) * num_ranks)


def policy(given: OrderingProblem, ahead: tuple[int, ...] | None = None, idleness: float = math.inf) -> Policy:
    zeros = (0.0,) * given.num_ranks
    return Policy(ahead or natural_ahead(given), zeros, zeros, (idleness,) * given.num_ranks)


def listed(given: OrderingProblem, chosen: Policy) -> Listed:
    found = list_schedule(given, chosen)
    assert found is not None
    schedule = PipelineSchedule("listed", given.stages, given.num_microbatches, found.orders)
    check_pipeline(schedule, given.cost, given.saved_bytes_limit)
    simulation = simulate(schedule, given.cost)
    assert simulation.span_seconds == pytest.approx(found.span_seconds)
    assert simulation.step_seconds == pytest.approx(found.step_seconds)
    return found


def test_with_room_nobody_idles() -> None:
    found = listed(problem(4, 12), policy(problem(4, 12)))
    assert max(found.span_seconds) == 36


@pytest.mark.parametrize("limit", [3.0, 6.0, 9.0, 12.0, 24.0])
def test_memory_is_kept_and_more_of_it_never_hurts_here(limit: float) -> None:
    found = listed(problem(4, 12, limit), policy(problem(4, 12)))
    assert max(found.span_seconds) <= {3.0: 144, 6.0: 84, 9.0: 60, 12.0: 42, 24.0: 37}[limit]


def test_a_limit_of_forwards_ahead_is_kept() -> None:
    given = problem(3, 9)
    found = listed(given, policy(given, ahead=(2, 2, 1)))
    for rank, most in enumerate((2, 2, 1)):
        ahead = peak = 0
        for action in found.orders[rank]:
            ahead += (action.kind == "F") - (action.kind == "I")
            peak = max(peak, ahead)
        assert peak == most


def test_no_memory_for_one_microbatch_gives_nothing() -> None:
    assert list_schedule(problem(2, 2, limit=2.0), policy(problem(2, 2))) is None


def test_later_stages_of_a_rank_keep_their_place() -> None:
    """Rank 0 holds the first stage and the last: filled with the first's values it could never run the last."""
    cost = PipelineCost.uniform(4, saved_bytes=1.0)
    given = OrderingProblem(cost, (0, 1, 1, 0), 8, (2.0, 2.0))
    listed(given, policy(given))
    listed(given, policy(given, ahead=(1, 1)))


def test_round_trips() -> None:
    given = problem(3, 4, communication=0.5)
    assert round_trips(given) == {2: 1.0, 1: 1.0 + 2 * 0.5 + 1.0 + 1.0, 0: 1.0 + 1.0 + 4.0 + 1.0}
    assert natural_ahead(given) == (7, 4, 1)
