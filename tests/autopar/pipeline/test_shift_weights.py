"""Weight gradients leave the critical path, and nothing gets worse."""

from __future__ import annotations

import random

from autopar.ir.actions import Action, PipelineSchedule, parse_schedule
from autopar.pipeline.check import check_pipeline
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.list_schedule import OrderingProblem
from autopar.pipeline.schedules import zb_h2
from autopar.pipeline.shift_weights import shift_weights
from autopar.pipeline.simulate import simulate


def span(problem: OrderingProblem, orders: tuple[tuple[Action, ...], ...]) -> float:
    schedule = PipelineSchedule("x", problem.stages, problem.num_microbatches, orders)
    check_pipeline(schedule, problem.cost, problem.saved_bytes_limit)
    return max(simulate(schedule, problem.cost).span_seconds)


def problem(num_ranks: int, num_microbatches: int, limit: float = 1e9) -> OrderingProblem:
    cost = PipelineCost.uniform(num_ranks, communication_seconds=0.25, saved_bytes=3.0, weight_saved_bytes=1.0)
    return OrderingProblem(cost, tuple(range(num_ranks)), num_microbatches, (limit,) * num_ranks)


TEXT = "pipeline x: 2 microbatches, stages on ranks 0 1\nrank 0 | 0F0 0F1 0I0 0I1 0W0 0W1\nrank 1 | 1F0 1I0 1W0 1F1 1I1 1W1"


def test_a_weight_gradient_that_holds_up_the_end_moves_back() -> None:
    given = problem(2, 2)
    orders = parse_schedule(TEXT).orders
    shifted = shift_weights(given, orders, 10)
    assert [str(each) for each in shifted[1]] == ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]
    assert span(given, shifted) < span(given, orders)


def test_the_step_may_be_what_is_to_be_short() -> None:
    given = problem(2, 2)
    orders = parse_schedule(TEXT).orders
    shifted = PipelineSchedule("x", (0, 1), 2, shift_weights(given, orders, 10, "step"))
    assert simulate(shifted, given.cost).step_seconds < simulate(PipelineSchedule("x", (0, 1), 2, orders), given.cost).step_seconds


def test_memory_forbids_it() -> None:
    """Rank 1 has room for one microbatch: its W must come before the next F."""
    given = OrderingProblem(problem(2, 2).cost, (0, 1), 2, (9.0, 3.5))
    orders = parse_schedule(TEXT).orders
    assert shift_weights(given, orders, 10)[1][2:4] == orders[1][2:4]


def test_no_attempt_no_change() -> None:
    orders = parse_schedule(TEXT).orders
    assert shift_weights(problem(2, 2), orders, 0) == orders


def test_never_longer() -> None:
    """From ZB-H2 with weight gradients thrown about at random."""
    draw = random.Random(0)
    for _ in range(10):
        given = problem(4, 8)
        orders = tuple(_shaken(order, draw) for order in zb_h2(4, 8).orders)
        assert span(given, shift_weights(given, orders, 60)) <= span(given, orders)


def _shaken(order: tuple[Action, ...], draw: random.Random) -> tuple[Action, ...]:
    row = list(order)
    for action in [each for each in order if each.kind == "W"]:
        row.remove(action)
        first = row.index(action._replace(kind="I")) + 1
        row.insert(draw.randint(first, len(row)), action)
    return tuple(row)
