"""Where sends, receives and waits go, and why nothing can block but data."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.pipeline.actions import Action, Edge, PipelineSchedule
from autopar.pipeline.check import check_program
from autopar.pipeline.expand import expand
from autopar.pipeline.program import PipelineProgram, Receive, Send, Wait, parse_instruction
from autopar.pipeline.schedules import GENERATORS, gpipe, interleaved, one_forward_one_backward, zb_h1, zb_v
from tests.support.faults.pipelines import Machine


def text(program: PipelineProgram, rank: int) -> list[str]:
    return [str(each) for each in program.ranks[rank]]


def test_the_instructions_of_one_forward_one_backward() -> None:
    program = expand(one_forward_one_backward(2, 2))
    assert text(program, 0) == [
        "0F0",
        "0SEND_F0>1@1",
        "0RECV_B0<1@1",  # One action ahead of its reader.
        "0F1",
        "0SEND_F1>1@1",
        "0RECV_B1<1@1",
        "WAIT 0RECV_B0<1@1",
        "WAIT 0SEND_F0>1@1",  # Known to be out: its gradient is back.
        "0B0",
        "WAIT 0RECV_B1<1@1",
        "WAIT 0SEND_F1>1@1",
        "0B1",
        "0REDUCE_GRAD",
    ]
    assert text(program, 1)[-3:] == ["1REDUCE_GRAD", "WAIT 1SEND_B0>0@0", "WAIT 1SEND_B1>0@0"]


def test_a_stage_is_reduced_after_its_last_backward() -> None:
    row = text(expand(zb_v(2, 2)), 0)
    assert row.index("3W1") + 1 == row.index("3REDUCE_GRAD") < row.index("0W1")


def test_neighbours_on_one_rank_send_nothing() -> None:
    program = expand(zb_v(2, 2))
    assert not [each for row in program.ranks for each in row if "2" in str(each) and "1SEND_F" in str(each)]
    assert expand(gpipe(1, 3)).ranks[0][-1] == parse_instruction("0REDUCE_GRAD")


def test_receives_follow_the_senders_order() -> None:
    """Rank 1 needs the second value first: it launches both receives, in the order of the sends."""
    forward = tuple(Action(0, "F", each) for each in (0, 1))
    first = (*forward, Action(0, "B", 1), Action(0, "B", 0))
    second = tuple(Action(1, kind, each) for each in (1, 0) for kind in ("F", "B"))
    program = expand(PipelineSchedule("crossed", (0, 1), 2, (first, second)))
    assert text(program, 1)[:4] == ["1RECV_F0<0@0", "1RECV_F1<0@0", "WAIT 1RECV_F1<0@0", "1F1"]
    assert not check_program(program) and Machine(program).run()


def test_prefetch_says_how_early_receives_are_launched() -> None:
    for prefetch in (0, 1, 3):
        row = text(expand(one_forward_one_backward(2, 8), prefetch=prefetch), 1)
        begin, end = row.index("1RECV_F5<0@0"), row.index("1F5")
        assert sum(word in row[begin:end] for word in ("1F4", "1B4", "1F3", "1B3")) == prefetch


def test_skips_and_edges_without_gradient() -> None:
    edges = (Edge(0, 1), Edge(1, 2), Edge(0, 2, has_gradient=False))
    program = expand(one_forward_one_backward(3, 4), edges)
    assert "0SEND_F1>2@2" in text(program, 0) and "2RECV_F1<0@0" in text(program, 2)
    assert not [each for each in text(program, 2) if "SEND_B" in each and ">0" in each]
    assert not check_program(program) and Machine(program).run()


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
        rows = machine.program.ranks
        while any([_one(machine, rank) for rank in range(len(rows))]):
            pass
        assert all(at == len(row) for at, row in zip(machine.at, rows, strict=True))


def _one(machine: Machine, rank: int) -> bool:
    row, at = machine.program.ranks[rank], machine.at[rank]
    if at < len(row) and isinstance(row[at], Wait) and not all(isinstance(each, Wait) for each in row[at:]):
        launched = row[at].launched  # type: ignore[union-attr]
        if isinstance(launched, Send):
            assert machine.passes(rank, launched), f"rank {rank} blocks at {row[at]}"
            assert any(action in machine.ran[launched.peer] for action in launched.transfer.readers)
        else:
            assert isinstance(launched, Receive)
    return machine.step(rank)


def test_refuses_edges_that_are_none() -> None:
    with pytest.raises(ScheduleError, match="an edge leads from a stage to a later one"):
        expand(gpipe(2, 2), (Edge(1, 0),))
