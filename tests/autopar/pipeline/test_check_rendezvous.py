"""What only all ranks together show: ends that do not meet, and ranks that wait for ever."""

from __future__ import annotations

from autopar.pipeline.actions import PipelineSchedule
from autopar.pipeline.check_rendezvous import check_rendezvous
from autopar.pipeline.program import PipelineProgram, parse_program
from autopar.pipeline.schedules import gpipe

NOTHING = PipelineSchedule("x", (0, 1, 2), 2, ((), (), ()))


def program(text: str) -> PipelineProgram:
    return parse_program(text, NOTHING)


def test_what_meets_is_fine() -> None:
    assert not check_rendezvous(program("rank 0\n0SEND_F0>1@1\nWAIT 0SEND_F0>1@1\nrank 1\n1RECV_F0<0@0\nWAIT 1RECV_F0<0@0"))


def test_a_wait_passes_once_the_other_end_is_launched_not_waited_for() -> None:
    """Both send first and wait last: fine under rendezvous, because launches do not block."""
    text = "rank 0\n0SEND_F0>1@1\n0RECV_B0<1@1\nWAIT 0SEND_F0>1@1\nrank 1\n1SEND_B0>0@0\n1RECV_F0<0@0\nWAIT 1SEND_B0>0@0"
    assert not check_rendezvous(program(text))


def test_two_that_wait_for_their_sends_first() -> None:
    text = """
    rank 0
    0SEND_F0>1@1
    WAIT 0SEND_F0>1@1
    0RECV_B0<1@1
    rank 1
    1SEND_B0>0@0
    WAIT 1SEND_B0>0@0
    1RECV_F0<0@0
    """
    (fault,) = check_rendezvous(program(text))
    assert fault.what == "deadlock: nobody can advance" and fault.expected == "no cycle of waits, and not rank 0 → 1 → 0"
    first = "rank 0, instruction 1: WAIT 0SEND_F0>1@1 (microbatch 0) waits for rank 1, which launches the other end at its instruction 2"
    assert f"{first} and stands at 1" in fault.got
    assert "rank 1, instruction 1: WAIT 1SEND_B0>0@0 (microbatch 0) waits for rank 0" in fault.got


def test_a_cycle_over_three_ranks() -> None:
    rows = []
    for rank in range(3):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        rows += [
            f"rank {rank}",
            f"{rank}SEND_F0>{after}@{after}",
            f"WAIT {rank}SEND_F0>{after}@{after}",
            f"{rank}RECV_F0<{before}@{before}",
        ]
    (fault,) = check_rendezvous(program("\n".join(rows)))
    assert fault.expected == "no cycle of waits, and not rank 0 → 1 → 2 → 0"
    assert len(fault.places) == 3


def test_a_receive_that_nobody_sends() -> None:
    faults = check_rendezvous(program("rank 1\n1RECV_F0<0@0\nWAIT 1RECV_F0<0@0"))
    assert [fault.what for fault in faults] == ["nobody sends this", "deadlock: nobody can advance"]
    assert faults[0].expected == "a send on rank 0" and faults[0].where == "rank 1, instruction 0: 1RECV_F0<0@0 (microbatch 0)"
    assert "waits for rank 0, which never launches the other end" in faults[1].got


def test_a_send_that_nobody_receives() -> None:
    faults = check_rendezvous(program("rank 0\n0SEND_F1>1@1\nWAIT 0SEND_F1>1@1"))
    assert [fault.what for fault in faults] == ["nobody receives this", "deadlock: nobody can advance"]


def test_a_peer_that_does_not_exist_is_waited_for_in_vain() -> None:
    faults = check_rendezvous(program("rank 0\n0SEND_F0>1@9\nWAIT 0SEND_F0>1@9"))
    assert [fault.what for fault in faults] == ["nobody receives this", "deadlock: nobody can advance"]


def test_only_the_first_difference_of_a_channel_is_named() -> None:
    sends = "rank 0\n" + "\n".join(f"0SEND_F{each}>1@1" for each in (0, 1, 2, 3))
    receives = "rank 1\n" + "\n".join(f"1RECV_F{each}<0@0" for each in (0, 2, 3, 1))
    (fault,) = check_rendezvous(program(f"{sends}\n{receives}"))
    assert fault.what == "send and receive number 2 from rank 0 to rank 1 carry different values"
    assert fault.got == "1RECV_F2<0@0" and "0SEND_F1>1@1 (microbatch 1)" in fault.expected


def test_one_rank_has_nobody_to_meet() -> None:
    assert not check_rendezvous(parse_program("rank 0\n0F0\n0B0", gpipe(1, 1)))
