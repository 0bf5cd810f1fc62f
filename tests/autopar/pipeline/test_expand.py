"""Where sends, receives and waits go, and why nothing can block but data."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.ir.actions import Action, Edge, PipelineSchedule, Reduction, Transfer
from autopar.ir.instructions import Run, Send, Wait, parse
from autopar.ir.schedule import Buffer, Span
from autopar.pipeline.check import schedule_violations
from autopar.pipeline.expand import expand, receives_of, run_of, sends_of, stage_edges
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.schedules import GENERATORS, gpipe, interleaved, one_forward_one_backward, zb_h1, zb_v
from tests.support.faults.pipelines import Machine


def text(program: ScheduleProgram, rank: int) -> list[str]:
    """The instructions without their buffers."""
    return [str(each).split(" (")[0] for each in program.places[rank].instructions]


def test_the_instructions_of_one_forward_one_backward() -> None:
    program = expand(one_forward_one_backward(2, 2))
    assert str(program.places[0]).splitlines() == [
        "RUN 0F0 () -> (0F0>1, 0F0.I, 0F0.W)",
        "SEND 0F0>1 pp=1 (0F0>1)",
        "RECV 1B0>0 pp=1 (1B0>0)",  # One action ahead of its reader.
        "RUN 0F1 () -> (0F1>1, 0F1.I, 0F1.W)",
        "SEND 0F1>1 pp=1 (0F1>1)",
        "RECV 1B1>0 pp=1 (1B1>0)",
        "WAIT 1B0>0",
        "WAIT 0F0>1",  # Known to be out: its gradient is back.
        "RUN 0B0 (1B0>0, 0F0.I, 0F0.W) -> ()",
        "WAIT 1B1>0",
        "WAIT 0F1>1",
        "RUN 0B1 (1B1>0, 0F1.I, 0F1.W) -> ()",
        "RUN 0REDUCE_GRAD () -> ()",
    ]
    assert text(program, 1)[-3:] == ["RUN 1REDUCE_GRAD", "WAIT 1B0>0", "WAIT 1B1>0"]


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_what_prints_parses_back(name: str) -> None:
    for schedule in expand(GENERATORS[name](3, 4)).places:
        assert parse(str(schedule)) == schedule.instructions


def test_names_say_what_they_stand_for_in_tables() -> None:
    program = expand(zb_v(2, 2))
    assert program.actions["1I0"] == Action(1, "I", 0) and program.actions["3REDUCE_GRAD"] == Reduction(3)
    assert program.transfers["2B1>1"] == Transfer(2, 1, "B", 1)
    assert program.buffers["2B1>1"] == Buffer("2B>1", microbatch=1)
    assert program.buffers["2F1.I"] == program.buffers["2F1.W"] == Buffer("2F", microbatch=1, role="saved")
    used = {name for schedule in program.places for each in schedule.instructions if isinstance(each, Run) for name in each.outputs}
    assert used == program.buffers.keys()
    assert program.order == zb_v(2, 2) and str(program.mesh) == "pp=2" and not program.is_executable


def test_every_action_is_a_span() -> None:
    schedule = expand(zb_v(2, 2)).places[0]
    assert [each.action for each in schedule.spans] == [str(each) for each in zb_v(2, 2).orders[0]]
    assert schedule.spans[0] == Span("0F0", 0, 1)


def test_what_actions_give_and_take() -> None:
    edges = (Edge(0, 1), Edge(0, 2, has_gradient=False), Edge(1, 2))
    assert list(sends_of(Action(0, "F", 3), edges)) == [Transfer(0, 1, "F", 3), Transfer(0, 2, "F", 3)]
    assert list(sends_of(Action(2, "I", 3), edges)) == [Transfer(2, 1, "B", 3)]
    assert list(receives_of(Action(2, "F", 3), edges)) == [Transfer(0, 2, "F", 3), Transfer(1, 2, "F", 3)]
    assert list(receives_of(Action(0, "B", 3), edges)) == [Transfer(1, 0, "B", 3)]
    assert not [*sends_of(Action(1, "W", 3), edges), *receives_of(Action(1, "W", 3), edges)]
    assert str(run_of(Action(1, "I", 3), ["2B3>1"], ["1B3>0"])) == "RUN 1I3 (2B3>1, 1F3.I, 1F3.W) -> (1B3>0)"
    assert str(run_of(Action(1, "W", 3), [], [])) == "RUN 1W3 (1F3.W) -> ()"
    assert stage_edges(expand(one_forward_one_backward(3, 1), edges)) == edges


def test_a_stage_is_reduced_after_its_last_backward() -> None:
    row = text(expand(zb_v(2, 2)), 0)
    assert row.index("RUN 3W1") + 1 == row.index("RUN 3REDUCE_GRAD") < row.index("RUN 0W1")


def test_neighbours_on_one_rank_send_nothing() -> None:
    program = expand(zb_v(2, 2))
    assert "SEND 0F1>1 pp=1" in text(program, 0) and not [each for each in text(program, 1) if "1F1>2" in each]
    reader = next(each for each in program.places[1].instructions if isinstance(each, Run) and each.fragment == "2F1")
    assert reader.inputs == ("1F1>2",), "it is read all the same"
    assert text(expand(gpipe(1, 3)), 0)[-1] == "RUN 0REDUCE_GRAD"


def test_receives_follow_the_senders_order() -> None:
    """Rank 1 needs the second value first: it launches both receives, in the order of the sends."""
    forward = tuple(Action(0, "F", each) for each in (0, 1))
    first = (*forward, Action(0, "B", 1), Action(0, "B", 0))
    second = tuple(Action(1, kind, each) for each in (1, 0) for kind in ("F", "B"))
    program = expand(PipelineSchedule("crossed", (0, 1), 2, (first, second)))
    assert text(program, 1)[:4] == ["RECV 0F0>1 pp=0", "RECV 0F1>1 pp=0", "WAIT 0F1>1", "RUN 1F1"]
    assert not schedule_violations(program) and Machine(program).run()


def test_prefetch_says_how_early_receives_are_launched() -> None:
    for prefetch in (0, 1, 3):
        row = text(expand(one_forward_one_backward(2, 8), prefetch=prefetch), 1)
        begin, end = row.index("RECV 0F5>1 pp=0"), row.index("RUN 1F5")
        assert sum(f"RUN {word}" in row[begin:end] for word in ("1F4", "1B4", "1F3", "1B3")) == prefetch


def test_skips_and_edges_without_gradient() -> None:
    edges = (Edge(0, 1), Edge(1, 2), Edge(0, 2, has_gradient=False))
    program = expand(one_forward_one_backward(3, 4), edges)
    assert "SEND 0F1>2 pp=2" in text(program, 0) and "RECV 0F1>2 pp=0" in text(program, 2)
    assert not [each for each in text(program, 2) if each.startswith("SEND 2B") and ">0" in each]
    assert not schedule_violations(program) and Machine(program).run()


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_every_program_runs_on_a_machine_with_rendezvous(name: str, prefetch: int) -> None:
    for num_ranks, num_microbatches in ((1, 2), (2, 5), (3, 4), (4, 9)):
        program = expand(GENERATORS[name](num_ranks, num_microbatches), prefetch=prefetch)
        assert Machine(program).run()


def test_a_wait_for_a_send_never_blocks() -> None:
    """When a rank comes to one that is not at its end, the receiver has read the value already: an action of its own is over."""
    for schedule in (zb_h1(4, 9), interleaved(3, 6, 2), zb_v(3, 7)):
        machine = Machine(expand(schedule))
        while any([_one(machine, rank) for rank in range(len(machine.rows))]):
            pass
        assert all(at == len(row) for at, row in zip(machine.at, machine.rows, strict=True))


def _one(machine: Machine, rank: int) -> bool:
    row, at = machine.rows[rank], machine.at[rank]
    if at < len(row) and isinstance(row[at], Wait) and not all(isinstance(each, Wait) for each in row[at:]):
        name = row[at].target  # type: ignore[union-attr]
        launched, _ = machine.numbers[rank, name]
        if isinstance(launched, Send):
            assert machine.passes(rank, name), f"rank {rank} blocks at {row[at]}"
            assert any(action in machine.ran[launched.peer] for action in machine.program.transfers[name].readers)
    return machine.step(rank)


def test_refuses_edges_that_are_none() -> None:
    with pytest.raises(ScheduleError, match="an edge leads from a stage to a later one"):
        expand(gpipe(2, 2), (Edge(1, 0),))
