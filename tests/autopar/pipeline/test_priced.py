"""The prices of stages: nothing lost, nothing twice, and what the placement was decided by."""

from __future__ import annotations

import math

import pytest

from autopar.driver.compiled import Compiled
from autopar.ir.actions import Edge
from autopar.ir.keys import DIMS, SHARDING, STAGE
from autopar.ir.markers import save
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.priced import call_seconds, price_pipeline
from autopar.pipeline.simulate import simulate
from autopar.pipeline.stage_work import Work
from autopar.reports.summary import memory
from tests.support.models.residual import BATCH, LENGTH, WIDTH, WORDS, interleaved_pipe, plain_pipe, tied_pipe

HIDDEN_BYTES = BATCH // 2 // 2 * LENGTH * WIDTH * 8  # of a microbatch on one of two dp ranks, float64


def priced(compiled: Compiled) -> PipelineCost:
    assert not compiled.order.is_single
    return price_pipeline(compiled.program, compiled.cost, compiled.order.num_stages)


def one_stage(compiled: Compiled) -> PipelineCost:
    """The same program, all of it on one stage."""
    program = compiled.program.copy()
    for node in Work(program).calls:
        STAGE[node] = 0
    return price_pipeline(program, compiled.cost, 1)


@pytest.mark.parametrize("pipe", [plain_pipe, interleaved_pipe])
def test_stages_add_up_to_the_program(pipe) -> None:  # type: ignore[no-untyped-def]
    compiled = pipe().compiled
    stages, (whole,) = priced(compiled).stages, one_stage(compiled).stages
    # Each stage that reads a transposed weight makes it; a view is all but free.
    assert sum(each.forward_seconds for each in stages) == pytest.approx(whole.forward_seconds, rel=1e-3)
    assert sum(each.seconds("B") for each in stages) == pytest.approx(whole.seconds("B"), rel=1e-3)
    assert sum(each.reduce_seconds for each in stages) == pytest.approx(whole.reduce_seconds, rel=1e-3)
    assert sum(each.held_bytes for each in stages) == whole.held_bytes
    work = Work(compiled.program)
    times = [
        len(work.stages[node]) * call_seconds(node, compiled.program, compiled.cost) for node in work.calls if node not in work.per_step
    ]
    assert sum(each.forward_seconds + each.seconds("B") for each in stages) == pytest.approx(math.fsum(times))


def test_one_stage_saves_what_the_program_does() -> None:
    compiled = plain_pipe().compiled
    (whole,) = one_stage(compiled).stages
    work = Work(compiled.program)
    saved = [node for node in work.calls if node.target is save and node not in work.per_step]
    saved_bytes = sum(compiled.cost.local_bytes(DIMS[node][0], node.meta["val"].dtype, SHARDING[node][0]) for node in saved)
    assert whole.saved_bytes == saved_bytes > 0
    assert whole.input_gradient_seconds == 0 and whole.weight_saved_bytes == whole.saved_bytes


def test_between_two_stages_the_hidden_state_goes_and_comes_back() -> None:
    compiled = plain_pipe().compiled
    for edge, price in priced(compiled).edges.items():
        assert edge.has_gradient and price.bytes % HIDDEN_BYTES == 0
        latency, rate = compiled.cost.send()
        assert price.seconds == pytest.approx(latency * len(Work(compiled.program).transfers[0, 1, "F"]) + rate * price.bytes)


def test_the_placement_was_decided_by_these_prices() -> None:
    compiled = plain_pipe().compiled
    prices, placed = priced(compiled), compiled.stages.placement.stages
    for number, (stage, each) in enumerate(zip(prices.stages, placed, strict=True)):
        assert stage.forward_seconds + stage.seconds("B") == pytest.approx(each.compute_seconds, rel=0.02)
        crossing = sum((1 + edge.has_gradient) * price.seconds for edge, price in prices.edges.items() if number in edge[:2])
        assert crossing == pytest.approx(each.communication_seconds)
        assert stage.held_bytes == each.held_bytes


def test_the_first_stage_has_no_gradient_of_its_input() -> None:
    first, last = priced(plain_pipe().compiled).stages
    assert first.input_gradient_seconds == 0 and first.weight_gradient_seconds > 0
    assert last.input_gradient_seconds > 0 and last.weight_gradient_seconds > 0
    assert 0 < last.weight_saved_bytes < last.saved_bytes


def test_both_ends_hold_a_tied_table() -> None:
    apart, tied = one_stage(tied_pipe().compiled).stages[0], priced(tied_pipe().compiled).stages
    table = 4 * WORDS * WIDTH * 8 + 4
    assert sum(each.held_bytes for each in tied) == apart.held_bytes + table


def test_a_slow_device_takes_longer() -> None:
    compiled = plain_pipe().compiled
    half = price_pipeline(compiled.program, compiled.cost, 2, (1.0, 0.5)).stages
    assert half[0] == priced(compiled).stages[0]
    assert half[1].forward_seconds == pytest.approx(2 * priced(compiled).stages[1].forward_seconds)


def test_a_schedule_runs_on_them() -> None:
    compiled = plain_pipe().compiled
    prices = priced(compiled)
    assert set(prices.edges) == {Edge(0, 1)}
    found = simulate(compiled.order, prices)
    busiest = max(2 * (each.forward_seconds + each.seconds("B")) for each in prices.stages)
    assert found.step_seconds > busiest and 0 < found.bubble_rate < 1


def test_memory_is_that_of_the_rank_that_holds_most() -> None:
    compiled = plain_pipe().compiled
    held = [each.held_bytes for each in priced(compiled).stages]
    found = memory(compiled.program, compiled.cost, compiled.order)
    assert sum(found.values()) - found["saved_activations"] == pytest.approx(max(held))
