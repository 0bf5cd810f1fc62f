"""A step on paper: times, bubbles, what everything waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar._torch import fake_mode
from autopar.errors import ScheduleError
from autopar.ir.actions import Edge, PipelineSchedule, chain, parse_schedule
from autopar.ir.instructions import Launch, Run, Send
from autopar.ir.mesh import Mesh
from autopar.pipeline.cost import EdgeCost, PipelineCost, StageCost
from autopar.pipeline.expand import expand
from autopar.pipeline.schedules import GENERATORS, gpipe, one_forward_one_backward, zb_h1
from autopar.pipeline.simulate import HostOf, Simulation, grid_seconds, simulate
from tests.support.schedules import fragment, retyped, schedule_of, whole


def starts(simulation: Simulation, rank: int) -> dict[str, float]:
    return {event.name: event.start_seconds for event in simulation.events if event.rank == rank and event.stream == "compute"}


def test_a_transfer_starts_when_made_and_delays_its_reader() -> None:
    simulation = simulate(gpipe(2, 1), PipelineCost.uniform(2, 1.0, 2.0, 3.0, communication_seconds=0.5))
    assert starts(simulation, 1) == {"1F0": 1.5, "1B0": 2.5}
    assert starts(simulation, 0) == {"0F0": 0.0, "0B0": 8.0}
    assert simulation.step_seconds == 13.0
    assert simulation.span_seconds == (13.0, 6.0) and simulation.busy_seconds == (6.0, 6.0)
    assert simulation.makespan_bubble_rate == pytest.approx(1 - 12 / 26)


def test_a_gradient_leaves_after_i_and_not_after_w() -> None:
    halved = parse_schedule("pipeline x: 1 microbatch, stages on ranks 0 1\nrank 0 | 0F0 0B0\nrank 1 | 1F0 1I0 1W0")
    assert starts(simulate(halved, PipelineCost.uniform(2)), 0)["0B0"] == 3.0
    assert starts(simulate(gpipe(2, 1), PipelineCost.uniform(2)), 0)["0B0"] == 4.0


def test_transfers_of_a_channel_queue_and_overlap_with_compute() -> None:
    """Five forwards of 1 s, each followed by a transfer of 2 s: the link is what the second rank waits for."""
    stage = StageCost(1.0, 0.0, 0.0)
    simulation = simulate(gpipe(2, 5), PipelineCost((stage, stage), {Edge(0, 1): EdgeCost(2.0)}))
    assert list(starts(simulation, 1).values())[:5] == [3.0, 5.0, 7.0, 9.0, 11.0]
    assert list(starts(simulation, 0).values())[:5] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_transfer_waits_for_its_receive() -> None:
    """Rank 1 launches a receive one action ahead: a transfer longer than an action cannot hide behind it."""
    times = {prefetch: simulate(expand(gpipe(2, 3), prefetch=prefetch), _slow_second()).step_seconds for prefetch in (0, 1, 2)}
    assert times[0] > times[1] >= times[2]


def _slow_second() -> PipelineCost:
    return PipelineCost((StageCost(1.0, 1.0, 0.0), StageCost(4.0, 4.0, 0.0)), {Edge(0, 1): EdgeCost(3.0)})


def test_every_run_and_every_send_has_its_price() -> None:
    program, cost = expand(gpipe(2, 1)), PipelineCost.uniform(2, 1.0, 2.0, 3.0, communication_seconds=0.5)
    seconds = grid_seconds(program, replace(cost, stages=(replace(cost.stages[0], reduce_seconds=7.0), cost.stages[1])))
    found = {str(each).split(" (")[0]: seconds(each) for each in program.places[0].instructions if isinstance(each, (Run, Send))}
    assert found == {"RUN 0F0": 1.0, "SEND 0F0>1 pp=1": 0.5, "RUN 0B0": 5.0, "RUN 0REDUCE_GRAD": 7.0}


def test_stages_on_one_rank_communicate_for_nothing() -> None:
    schedule = PipelineSchedule(
        "one", (0, 0), 1, (parse_schedule("pipeline x: 1 microbatch, stages on ranks 0 0\nrank 0 | 0F0 1F0 1B0 0B0").orders[0],)
    )
    assert simulate(schedule, PipelineCost.uniform(2, communication_seconds=9.0)).step_seconds == 6.0


def test_skip_edges_are_waited_for() -> None:
    stage = StageCost(1.0, 1.0, 1.0)
    edges = {edge: EdgeCost() for edge in chain(3)} | {Edge(0, 2): EdgeCost(5.0)}
    assert starts(simulate(one_forward_one_backward(3, 1), PipelineCost((stage,) * 3, edges)), 2)["2F0"] == 6.0


def test_a_reduction_overlaps_and_ends_the_step() -> None:
    stages = (StageCost(1.0, 1.0, 1.0, reduce_seconds=4.0), StageCost(1.0, 1.0, 1.0, reduce_seconds=4.0))
    simulation = simulate(gpipe(2, 1), PipelineCost(stages, {Edge(0, 1): EdgeCost()}))
    reductions = [(event.rank, event.start_seconds) for event in simulation.events if event.stream == "reduce"]
    assert sorted(reductions) == [(0, 6.0), (1, 4.0)]
    assert simulation.step_seconds == 10.0 and simulation.span_seconds == (6.0, 3.0)
    assert simulation.critical_path[-1].name == "0REDUCE_GRAD"


def test_the_critical_path_has_no_gap_and_is_as_long_as_the_step() -> None:
    cost = PipelineCost.uniform(4, 1.0, 1.3, 0.7, communication_seconds=0.2)
    for generator in (gpipe, one_forward_one_backward, zb_h1):
        simulation = simulate(generator(4, 7), cost)
        path = simulation.critical_path
        assert path[0].start_seconds == 0.0 and path[-1].end_seconds == simulation.step_seconds
        assert all(before.end_seconds == pytest.approx(after.start_seconds) for before, after in zip(path, path[1:], strict=False))


def test_uneven_stages_idle_for_the_slowest() -> None:
    stages = (StageCost(1.0, 1.0, 1.0), StageCost(2.0, 2.0, 2.0))
    simulation = simulate(one_forward_one_backward(2, 50), PipelineCost(stages, {Edge(0, 1): EdgeCost()}))
    assert simulation.busy_seconds == (150.0, 300.0)
    assert simulation.bubble_rate == pytest.approx(1 - 450 / (2 * max(simulation.span_seconds)))


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_twice_the_same(name: str) -> None:
    schedule = GENERATORS[name](3, 6)
    cost = PipelineCost.uniform(schedule.num_stages, 1.0, 1.1, 0.9, communication_seconds=0.05)
    assert simulate(schedule, cost) == simulate(schedule, cost)


def test_the_report_reads() -> None:
    text = str(simulate(zb_h1(2, 20), PipelineCost.uniform(2, saved_bytes=10.0)))
    assert text.startswith("step 61 s, bubble 1.64% of the longest span")
    assert "rank 0: busy 60 s of 61 s, peak 20 bytes, at most 2 live microbatches" in text
    assert "critical path: 0F0" in text and "more …" in text


def test_a_schedule_that_never_ends_is_refused() -> None:
    stuck = parse_schedule("pipeline x: 1 microbatch, stages on ranks 0 1\nrank 0 | 0B0 0F0\nrank 1 | 1F0 1B0")
    with pytest.raises(ScheduleError, match=r"nobody can advance: rank 0 at WAIT 1B0>0, rank 1 at WAIT 0F0>1; check_pipeline"):
        simulate(stuck, PipelineCost.uniform(2))


# What each fragment, collective and transfer of the programs below takes.
TAKES = {"f": 1.0, "g": 1.0, "h": 1.0, "all_reduce": 2.5, "t": 4.0}


def written(
    *texts: str, axes: tuple[tuple[str, int], ...] = (("dp", 2),), busy: float = 0.0, host_of: HostOf = lambda each: 0.0
) -> Simulation:
    names = dict.fromkeys("xyabcdrst", ((2,), torch.float32))
    schedules = [retyped(schedule_of(text, "x"), names) for text in texts]
    fragments = {name: fragment(name, lambda x: (x + 1,)) for name in "fgh"}
    buffers = {name: buffer for schedule in schedules for name, buffer in schedule.buffers.items()}
    for each in fragments.values():
        with fake_mode():
            next(iter(each.module.graph.nodes)).meta["val"] = torch.empty(2)
    program = whole(Mesh(axes), *schedules).with_places(schedules, fragments=fragments, buffers=buffers)

    def seconds(each: Run | Send | Launch) -> float:
        return TAKES[each.fragment if isinstance(each, Run) else each.transfer if isinstance(each, Send) else each.collective]

    return simulate(program, seconds, busy_of=lambda axes: busy, host_of=host_of)


def test_a_collective_is_hidden_by_what_runs_until_its_wait() -> None:
    text = "RUN f (x) -> (a)\nLAUNCH all_reduce sum dp (a) -> r\n{}WAIT r\nRUN h (r) -> (b)"
    alone, hidden = written(text.format("")), written(text.format("RUN g (a) -> (c)\nRUN g (c) -> (d)\n"))
    assert alone.step_seconds == 4.5 and alone.instruction_seconds == ((1.0, 1.0, 3.5, 4.5),)
    assert hidden.step_seconds == 4.5 and hidden.instruction_seconds == ((1.0, 1.0, 2.0, 3.0, 3.5, 4.5),), "half a second is exposed"
    assert hidden.busy_seconds == (4.0,) and [event.stream for event in hidden.events] == ["compute", "dp", *["compute"] * 3]
    assert [event.name for event in hidden.critical_path] == ["f", "r", "h"]


def test_what_computes_beside_a_collective_is_left_the_rest_of_the_device() -> None:
    text = "RUN f (x) -> (a)\nLAUNCH all_reduce sum dp (a) -> r\nRUN g (a) -> (c)\nRUN g (c) -> (d)\nWAIT r\nRUN h (r) -> (b)"
    assert written(text, busy=0.5).instruction_seconds == ((1.0, 1.0, 3.0, 4.25, 4.25, 5.25),), "half as fast until 3.5"
    both = "LAUNCH all_reduce sum dp (x) -> a\nLAUNCH all_reduce sum tp (x) -> b\nRUN g (x) -> (c)\nWAIT a\nWAIT b"
    found = written(both, axes=(("dp", 2), ("tp", 2)), busy=0.8)
    assert found.instruction_seconds == ((0.0, 0.0, pytest.approx(3.25), pytest.approx(3.25), pytest.approx(3.25)),), (
        "a tenth is left at least"
    )


def test_what_the_host_takes_is_beside_what_it_launched_and_behind_what_it_ran() -> None:
    text = "RUN f (x) -> (a)\nLAUNCH all_reduce sum dp (a) -> r\nRUN g (a) -> (c)\nWAIT r\nRUN h (r) -> (b)"
    found = written(text, host_of=lambda each: 0.5 if isinstance(each, Launch) else 0.0)
    assert found.instruction_seconds == ((1.0, 1.5, 2.5, 3.5, 4.5),), "the collective is under way meanwhile"
    assert found.busy_seconds == (3.0,) and len(found.events) == 4, "it is no event"
    found = written(text, host_of=lambda each: 0.25)
    assert found.instruction_seconds == ((1.25, 1.5, 2.75, 4.0, 5.25),) and found.step_seconds == 5.25
    assert written(text, busy=0.5, host_of=lambda each: 0.5 if isinstance(each, Launch) else 0.0).instruction_seconds[0][1] == 2.0


def test_collectives_over_the_same_axes_follow_each_other_and_others_do_not_wait() -> None:
    text = "LAUNCH all_reduce sum dp (x) -> a\nLAUNCH all_reduce sum dp (x) -> b\nLAUNCH all_reduce sum tp (x) -> c\nWAIT c\nWAIT a\nWAIT b"
    assert written(text, axes=(("dp", 2), ("tp", 2))).instruction_seconds == ((0.0, 0.0, 0.0, 2.5, 2.5, 5.0),)


def test_a_finished_program_has_transfers_and_the_memory_of_its_buffers() -> None:
    found = written("RUN f (x) -> (a)\nSEND t pp=1 (a)\nWAIT t\nFREE a", "RECV t pp=0 (y)\nWAIT t\nRUN g (y) -> (b)", axes=(("pp", 2),))
    assert found.instruction_seconds == ((1.0, 1.0, 5.0, 5.0), (0.0, 5.0, 6.0))
    assert found.peak_bytes == (16, 24)


def test_a_collective_between_places_is_not_simulated() -> None:
    with pytest.raises(ScheduleError, match="a collective along pp"):
        written(*["LAUNCH all_reduce sum pp (x) -> a\nWAIT a"] * 2, axes=(("pp", 2),))
