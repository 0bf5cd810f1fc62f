"""The drawn schedules: their pictures, their bubbles, what they hold; right for every number of microbatches."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.ir.actions import PipelineSchedule
from autopar.pipeline.check import schedule_violations
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.expand import expand
from autopar.pipeline.schedules import GENERATORS, generate, gpipe, interleaved, one_forward_one_backward, zb_h1, zb_h2, zb_v
from autopar.pipeline.simulate import Simulation, simulate
from benchmarks.bubbles import Run, drawn_rates, published


def rows(schedule: PipelineSchedule) -> list[str]:
    return [line.split("| ")[1] for line in str(schedule).splitlines()[1:]]


def uniform(schedule: PipelineSchedule) -> Simulation:
    return simulate(schedule, PipelineCost.uniform(schedule.num_stages))


def test_gpipe() -> None:
    assert rows(gpipe(2, 3)) == ["0F0 0F1 0F2 .   .   .   0B0 -   0B1 -   0B2 -", ".   1F0 1F1 1F2 1B0 -   1B1 -   1B2 -"]


def test_one_forward_one_backward() -> None:
    assert rows(one_forward_one_backward(3, 4)) == [
        "0F0 0F1 0F2 .   .   .   .   0B0 -   0F3 0B1 -   .   0B2 -   .   0B3 -",
        ".   1F0 1F1 .   .   1B0 -   1F2 1B1 -   1F3 1B2 -   .   1B3 -",
        ".   .   2F0 2B0 -   2F1 2B1 -   2F2 2B2 -   2F3 2B3 -",
    ]


def test_interleaved() -> None:
    assert rows(interleaved(2, 4, 2)) == [
        "0F0 0F1 2F0 2F1 0F2 .   2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -   .   2B2 -   .   2B3 -   0B2 -   0B3 -",
        ".   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 -   3F3 3B3 -   1B2 -   1B3 -",
    ]


def test_zb_h1() -> None:
    assert rows(zb_h1(3, 4)) == [
        "0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        ".   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        ".   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_h2() -> None:
    assert rows(zb_h2(2, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        ".   1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


def test_zb_v() -> None:
    assert rows(zb_v(2, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        ".   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    assert zb_v(2, 3).stages == (0, 1, 1, 0)


RANKS = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 3, 4, 8, 13, 16)


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_bubbles_of_uniform_stages_are_the_closed_forms(num_ranks: int, num_microbatches: int) -> None:
    p, m = num_ranks, num_microbatches
    for generator in (gpipe, one_forward_one_backward):
        simulation = uniform(generator(p, m))
        assert simulation.bubble_rate == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert simulation.makespan_bubble_rate == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    if m >= p:
        assert uniform(zb_h1(p, m)).bubble_rate == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-12)
    for num_chunks in (1, 2, 3) if m % p == 0 else ():
        assert uniform(interleaved(p, m, num_chunks)).bubble_rate == pytest.approx((p - 1) / (num_chunks * m + p - 1), abs=1e-12)
    if m >= 2 * p - 1:
        assert uniform(zb_h2(p, m)).bubble_rate == pytest.approx(0, abs=1e-12)
        assert uniform(zb_v(p, m)).bubble_rate == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_live_microbatches(num_ranks: int, num_microbatches: int) -> None:
    p, m = num_ranks, num_microbatches
    assert uniform(gpipe(p, m)).peak_live_microbatches == (m,) * p
    assert uniform(one_forward_one_backward(p, m)).peak_live_microbatches == tuple(min(p - rank, m) for rank in range(p))
    assert max(uniform(zb_h1(p, m)).peak_live_microbatches) <= p
    assert max(uniform(zb_h2(p, m)).peak_live_microbatches) <= 2 * p - 1
    assert max(uniform(zb_v(p, m)).peak_live_microbatches) <= 2 * p


def test_half_the_saved_bytes_wait_for_w() -> None:
    """ZB-H1 holds no more than 1F1B's first rank where W keeps less than I frees."""
    cost = PipelineCost.uniform(8, saved_bytes=3.0, weight_saved_bytes=1.0)
    assert max(simulate(zb_h1(8, 20), cost).peak_bytes) <= simulate(one_forward_one_backward(8, 20), cost).peak_bytes[0]


@pytest.mark.parametrize("run", published(), ids=lambda run: f"{run.model}-{run.num_microbatches}")
def test_the_papers_rates_follow_from_its_times(run: Run) -> None:
    rates = drawn_rates(run)
    for name in ("1F1B", "ZB-H1", "ZB-H2"):
        assert rates[name] == pytest.approx(run.rates[name], abs=1e-4), name
    assert rates["1F1B-I"] == pytest.approx(run.rates["1F1B-I"], abs=4e-3)


def violations(num_ranks: int, num_microbatches: int, max_chunks: int) -> list[str]:
    schedules = [generator(num_ranks, num_microbatches) for generator in GENERATORS.values()]
    schedules += [interleaved(num_ranks, num_microbatches, chunks) for chunks in range(1, max_chunks + 1)]
    return [f"{each.name} {num_ranks} {num_microbatches}: {fault}" for each in schedules for fault in schedule_violations(expand(each))]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 7), (3, 1), (4, 4), (4, 9), (5, 3), (8, 5), (8, 17)])
def test_no_false_alarm(num_ranks: int, num_microbatches: int) -> None:
    assert not violations(num_ranks, num_microbatches, 4)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_no_false_alarm_anywhere(num_ranks: int) -> None:
    assert not [each for num_microbatches in range(1, 33) for each in violations(num_ranks, num_microbatches, 4)]


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_each_has_a_name_and_is_drawn_in_its_comment(name: str) -> None:
    schedule = generate(name, 2, 4)
    assert schedule.name == name
    drawn = [line.strip() for line in (GENERATORS[name].__doc__ or "").splitlines() if line.strip().startswith("rank")]
    assert drawn == str(schedule).splitlines()[1:]


def test_interleaved_takes_chunks_by_name() -> None:
    assert generate("interleaved", 2, 4, 3).num_stages == 6


def test_refuses_a_name_that_is_none() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called '1b1f': there are auto, gpipe, 1f1b, interleaved"):
        generate("1b1f", 2, 4)


def test_refuses_numbers_that_make_no_pipeline() -> None:
    with pytest.raises(ScheduleError, match="one or more ranks and microbatches, not 0 and 4"):
        gpipe(0, 4)
    with pytest.raises(ScheduleError, match="not 2 and 0"):
        zb_v(2, 0)
    with pytest.raises(ScheduleError, match="one or more stages a rank, not 0"):
        interleaved(2, 2, 0)
