"""`schedule="auto"`: at least as good as what is drawn by hand, within memory, the same every time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from autopar.errors import ScheduleError
from autopar.ir.actions import Edge, PipelineSchedule, parse_schedule
from autopar.pipeline.auto_schedule import auto_schedule
from autopar.pipeline.check import check_pipeline
from autopar.pipeline.cost import EdgeCost, PipelineCost, StageCost
from autopar.pipeline.schedules import interleaved, one_forward_one_backward, zb_h1, zb_h2, zb_v
from autopar.pipeline.simulate import simulate
from benchmarks.bubbles import Run, found_rate, published

EFFORT = 30_000


def rate_is_reached(run: Run) -> None:
    for limit in (1, 2):
        rate, _ = found_rate(run, limit)
        assert rate <= run.rates[f"ZB-{limit}p"] + 1e-4, f"{run.model} {run.num_microbatches} ZB-{limit}p"


@pytest.mark.parametrize("run", published()[:1], ids=lambda run: f"{run.model}-{run.num_microbatches}")
def test_idles_no_more_than_the_papers_search(run: Run) -> None:
    rate_is_reached(run)


@pytest.mark.slow
@pytest.mark.parametrize("run", published()[1:], ids=lambda run: f"{run.model}-{run.num_microbatches}")
def test_idles_no_more_than_the_papers_search_at_size(run: Run) -> None:
    rate_is_reached(run)


def uneven(num_ranks: int) -> PipelineCost:
    """The first stage has no input gradient to give, the last bears a head."""
    stage = StageCost(1.0, 1.0, 0.8, saved_bytes=10.0, weight_saved_bytes=4.0)
    first = StageCost(1.1, 0.1, 1.6, saved_bytes=10.0, weight_saved_bytes=9.0)
    last = StageCost(1.6, 1.5, 0.9, saved_bytes=14.0, weight_saved_bytes=4.0)
    edges = {Edge(each, each + 1): EdgeCost(0.05, 1.0) for each in range(num_ranks - 1)}
    return PipelineCost((first, *(stage,) * (num_ranks - 2), last), edges)


@pytest.mark.parametrize("num_microbatches", [1, 4, 7, 16])
def test_uneven_stages_beat_every_drawing(num_microbatches: int) -> None:
    cost = uneven(4)
    budget = 90.0
    found = simulate(auto_schedule(cost, num_microbatches, budget_bytes=budget, effort=EFFORT), cost)
    for generator in (one_forward_one_backward, zb_h1, zb_h2):
        drawn = simulate(generator(4, num_microbatches), cost)
        if max(drawn.peak_bytes) <= budget:
            assert max(found.span_seconds) <= max(drawn.span_seconds) * (1 + 1e-9)
    if num_microbatches == 16:
        assert max(found.span_seconds) < 0.97 * max(simulate(zb_h1(4, 16), cost).span_seconds)


def test_less_memory_is_kept_and_costs_time() -> None:
    cost = uneven(4)
    spans: list[float] = []
    for budget in (20.0, 30.0, 60.0):
        schedule = auto_schedule(cost, 12, budget_bytes=budget, effort=EFFORT)
        check_pipeline(schedule, cost, budget)
        spans.append(max(simulate(schedule, cost).span_seconds))
    assert spans[0] > spans[1] > spans[2]


def test_budgets_may_differ_by_rank() -> None:
    budgets = (60.0, 20.0, 30.0, 16.0)
    check_pipeline(auto_schedule(uneven(4), 8, budget_bytes=budgets, effort=EFFORT), uneven(4), budgets)


@pytest.mark.parametrize("drawn", [zb_v(3, 7), interleaved(3, 6, 2)], ids=lambda schedule: schedule.name)
def test_several_stages_a_rank(drawn: PipelineSchedule) -> None:
    cost = PipelineCost.uniform(drawn.num_stages, communication_seconds=0.1, saved_bytes=1.0)
    budget = max(simulate(drawn, cost).peak_bytes)
    found = auto_schedule(cost, drawn.num_microbatches, drawn.stages, budget, effort=EFFORT)
    check_pipeline(found, cost, budget)
    assert max(simulate(found, cost).span_seconds) <= max(simulate(drawn, cost).span_seconds)


def test_the_objective_is_what_it_says() -> None:
    cost = uneven(4)
    span, step = (simulate(auto_schedule(cost, 6, objective=each, effort=EFFORT), cost) for each in ("span", "step"))
    assert step.step_seconds <= span.step_seconds
    assert max(span.span_seconds) <= max(step.span_seconds)


def test_an_undivided_backward_is_kept_where_it_saves() -> None:
    """Halving costs half a second: with one rank there is nothing to gain by it."""
    stage = StageCost(1.0, 1.0, 1.0, backward_seconds=1.5)
    schedule = auto_schedule(PipelineCost((stage,), {}), 3, effort=EFFORT)
    assert {action.kind for action in schedule.orders[0]} == {"F", "B"}


def test_nobody_waits_for_the_first_stages_input_gradient() -> None:
    """Where I is followed by W there, they are one B."""
    order = auto_schedule(uneven(4), 8, effort=EFFORT).orders[0]
    assert not [one for one, other in zip(order, order[1:], strict=False) if one.kind == "I" and other == one._replace(kind="W")]


def test_equal_prices_give_equal_schedules_and_they_print() -> None:
    schedule = auto_schedule(uneven(3), 5, budget_bytes=60.0, effort=EFFORT)
    assert schedule == auto_schedule(uneven(3), 5, budget_bytes=60.0, effort=EFFORT)
    assert parse_schedule(str(schedule)) == schedule and schedule.name == "auto"


def random_cost(draw: random.Random, stages: Sequence[int]) -> PipelineCost:
    prices: list[StageCost] = []
    for _ in stages:
        saved = draw.uniform(1, 3)
        seconds = (draw.uniform(0.5, 2), draw.uniform(0, 2), draw.uniform(0.3, 2))
        prices.append(StageCost(*seconds, saved_bytes=saved, weight_saved_bytes=saved * draw.random(), working_bytes=0.5))
    edges = {Edge(each, each + 1): EdgeCost(draw.random() * 0.3, 0.3) for each in range(len(stages) - 1)}
    if len(stages) > 2:
        edges[Edge(0, len(stages) - 1, draw.random() < 0.5)] = EdgeCost(0.1, 0.2)
    return PipelineCost(tuple(prices), edges)


@pytest.mark.parametrize("seed", range(12))
def test_any_placement_with_little_memory(seed: int) -> None:
    """Skips, several stages a rank, buffers, and room for little more than one microbatch: found, proved, within budget."""
    draw = random.Random(seed)
    num_ranks = draw.randint(1, 4)
    stages = [*range(num_ranks), *(draw.randrange(num_ranks) for _ in range(draw.randint(0, num_ranks)))]
    cost = random_cost(draw, stages)
    own = [sum(price.saved_bytes for price, holder in zip(cost.stages, stages, strict=True) if holder == rank) for rank in range(num_ranks)]
    budgets = [each + 2.5 for each in own]
    schedule = auto_schedule(cost, draw.randint(1, 7), stages, budgets, effort=5_000)
    check_pipeline(schedule, cost, budgets)


def test_refuses_a_budget_that_holds_no_microbatch() -> None:
    with pytest.raises(ScheduleError, match=r"rank 3 has 12 bytes and needs 14 for one microbatch"):
        auto_schedule(uneven(4), 4, budget_bytes=12.0, effort=EFFORT)


@pytest.mark.parametrize(
    ("stages", "num_microbatches", "budgets", "message"),
    [
        ((0, 1), 4, 100.0, "2 stages placed, 4 priced, 4 microbatches"),
        (None, 0, 100.0, "0 microbatches"),
        (None, 4, (1.0, 2.0), "2 budgets for 4 ranks"),
    ],
)
def test_refuses_what_does_not_fit(stages: tuple[int, ...] | None, num_microbatches: int, budgets: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        auto_schedule(uneven(4), num_microbatches, stages, budgets)  # type: ignore[arg-type]
