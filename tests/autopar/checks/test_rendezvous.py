"""Transfers that do not meet, ranks that would wait for ever: each is named with ranks and instructions."""

from __future__ import annotations

import random

import pytest
import torch

from autopar.checks.schedule import check_schedule
from autopar.checks.violation import Violation
from autopar.errors import ScheduleError
from autopar.ir.instructions import parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Signature
from autopar.ir.schedule import Schedule
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.interpreter import RankState, execute
from autopar.runtime.execute.virtual import Rendezvous, VirtualTransport, drive
from tests.support.schedules import buffers_of, check_schedules
from tests.support.stage_schedules import FIRST, LAST, LAYOUT, MESH, edited, first, last

PAIR = Mesh((("pp", 2),))


def found(one: Schedule, other: Schedule) -> list[Violation]:
    """Ranks 0 and 1 share a schedule, ranks 2 and 3 hold equal ones."""
    return check_schedule({0: one, 1: one, 2: other, 3: Schedule(**vars(other))}, MESH)


def test_sound_stages_pass() -> None:
    check_schedules([first(), first(), last(), last()], MESH)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([("pp=0 (h@0)", "pp=1 (h@0)")], "rank 2 itself stands at pp=1"),
        ([("pp=0 (h@0)", "pp=2 (h@0)")], "no rank at pp=2; the coordinates on pp are 0 to 1"),
        ([("pp=0 (h@0)", "ep=0 (h@0)")], "unknown axis 'ep'"),
    ],
)
def test_a_peer_that_is_not_there_is_named_for_each_rank(changes: list[tuple[str, str]], expected: str) -> None:
    violations = found(first(), last(edited(LAST, *changes)))
    assert [violation.what for violation in violations] == ["no such peer"] * 2
    assert violations[0].where.startswith("rank 2, instruction 0: RECV 0F0>1") and expected in violations[0].got
    assert violations[1].where.startswith("rank 3")


def test_a_stage_that_two_ranks_of_the_axis_share_would_talk_to_itself() -> None:
    both = first()
    violations = check_schedule(dict.fromkeys(range(4), both), MESH)
    assert [violation.where[:6] for violation in violations] == ["rank 2"] and "itself" in violations[0].got, "rank 3 is like it"


def test_receives_in_another_order_than_the_sends_are_named() -> None:
    swapped = edited(LAST, ("0F0>1", "0F9>1"), ("0F1>1", "0F0>1"), ("0F9>1", "0F1>1"))
    violations = [violation for violation in found(first(), last(swapped)) if "different transfers" in violation.what]
    assert violations[0].what == "send and receive number 1 from rank 0 to rank 2 are different transfers"
    assert violations[0].where == "rank 2, instruction 0: RECV 0F1>1 pp=0 (h@0)"
    assert violations[0].expected == "rank 0, instruction 1: SEND 0F0>1 pp=1 (h@0)"
    assert violations[0].instructions == ((2, 0), (0, 1)), "both ends"


@pytest.mark.parametrize("layout", [((4, 2), torch.float32), ((4, 4), torch.bfloat16)])
def test_other_shapes_and_dtypes_are_named_with_both_values(layout: tuple[tuple[int, ...], torch.dtype]) -> None:
    violations = [each for each in found(first(), last(LAST, **{"d@1": layout})) if "differ in shape" in each.what]
    assert violations[0].what == "send and receive number 2 from rank 2 to rank 0 differ in shape or dtype"
    shown = "f32[4, 2]" if layout[1] == torch.float32 else "bf16[4, 4]"
    assert violations[0].expected == f"{shown}, as d@1 in rank 2, instruction 7: SEND 1B1>0 pp=0 (d@1)"
    assert violations[0].got == "f32[4, 4] for d@1" and violations[0].where.startswith("rank 0, instruction 10: RECV 1B1>0")


def test_replicas_that_share_their_schedules_are_told_of_once() -> None:
    one, other = first(), last(LAST, **{"d@1": ((4, 2), torch.float32)})
    assert [each.what[:15] for each in check_schedule({0: one, 1: one, 2: other, 3: other}, MESH)] == ["send and receiv"]


def test_another_number_of_buffers_is_named() -> None:
    more = first(edited(FIRST, ("SEND 0F1>1 pp=1 (h@1)", "SEND 0F1>1 pp=1 (h@1, w)")))
    violations = found(more, last())
    assert violations[0].what == "send and receive number 2 from rank 0 to rank 2 carry different numbers of buffers"
    assert violations[0].expected.startswith("2 as in rank 0, instruction 3: SEND 0F1>1") and violations[0].got == "1"


def test_a_send_without_a_receive_and_the_wait_that_never_ends_are_named() -> None:
    without = last(edited(LAST, ("RECV 0F1>1 pp=0 (h@1)\nWAIT 0F1>1\n", ""), ("RUN f1 (h@1)", "RUN f1 (h@0)"), ("d@0 h@1 d@1", "d@0 d@1")))
    missing, deadlock = [each for each in found(first(), without) if "rank 1" not in each.where]
    assert missing.what == "nobody receives this" and missing.where == "rank 0, instruction 3: SEND 0F1>1 pp=1 (h@1)"
    assert missing.got == "2 sends and 1 receives from rank 0 to rank 2"
    assert "rank 0, instruction 14: WAIT 0F1>1 (SEND 0F1>1 pp=1 (h@1)) waits for rank 2, which never launches it" in deadlock.got
    assert deadlock.expected == "all ends of what a WAIT names are launched"


def test_a_receive_without_a_send_is_named() -> None:
    more = edited(LAST, ("WAIT 1B0>0\n", "RECV 0F2>1 pp=0 (h@2)\nWAIT 0F2>1\nFREE h@2\nWAIT 1B0>0\n"))
    whats = [(each.what, each.where) for each in found(first(), last(more))]
    assert ("nobody sends this", "rank 2, instruction 8: RECV 0F2>1 pp=0 (h@2)") in whats


def test_waits_in_a_cycle_are_a_deadlock_that_names_every_stuck_rank() -> None:
    """Rank 0 waits for its first send before it launches the receive that rank 2 waits for, before its own first receive."""
    one = edited(FIRST, ("WAIT 0F0>1\n", ""), ("SEND 0F0>1 pp=1 (h@0)\n", "SEND 0F0>1 pp=1 (h@0)\nWAIT 0F0>1\n"))
    other = "RUN f1 (z) -> (d@0)\nSEND 1B0>0 pp=0 (d@0)\nWAIT 1B0>0\n" + edited(LAST.strip(), ("SEND 1B0>0 pp=0 (d@0)\n", ""))
    other = edited(other, ("RUN f1 (h@0) -> (d@0)\n", ""), ("WAIT 1B0>0\nWAIT 1B1>0", "WAIT 1B1>0"))
    deadlock = found(first(one), last(other))[-1]
    assert deadlock.what == "deadlock: nobody can advance" and deadlock.expected == "no cycle of waits, and not rank 0 → 2 → 0"
    lines = [line.strip() for line in deadlock.got.splitlines()]
    assert lines[0] == (
        "rank 0, instruction 2: WAIT 0F0>1 (SEND 0F0>1 pp=1 (h@0)) waits for rank 2, which launches it at instruction 3 and stands at 2"
    )
    assert len(lines) == 4 and [line[:6] for line in lines] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [rank for rank, _ in deadlock.instructions] == [0, 1, 2, 3] and deadlock.instructions[0] == (0, 2)


def test_a_transfer_on_the_other_side_of_a_collective_is_a_deadlock() -> None:
    """Each alone is in order: the collective on all, the transfer on its channel."""
    text = "LAUNCH all_reduce sum pp (a) -> r\nWAIT r\nSEND t pp=1 (a)\nWAIT t\nFREE r"
    other = "RECV t pp=0 (b)\nWAIT t\nLAUNCH all_reduce sum pp (a) -> r\nWAIT r\nFREE r b"
    shapes = dict.fromkeys(("a", "b", "r"), LAYOUT)
    both = {rank: Schedule(parse(each), {}, (), (), Signature((), ()), buffers_of(each, shapes)) for rank, each in enumerate((text, other))}
    deadlock = check_schedule(both, PAIR)[-1]
    assert deadlock.expected == "no cycle of waits, and not rank 0 → 1 → 0"
    assert "rank 0, instruction 1: WAIT r (LAUNCH all_reduce sum pp (a) -> r) waits for rank 1" in deadlock.got
    assert "rank 1, instruction 1: WAIT t (RECV t pp=0 (b)) waits for rank 0, which launches it at instruction 2" in deadlock.got


def test_a_transfer_across_pause_is_named() -> None:
    both = {0: first("SEND t pp=1 (x)\nPAUSE\nWAIT t\nADD gradient (x)"), 1: last("PAUSE\nRECV t pp=0 (h)\nWAIT t\nFREE h")}
    (violation,) = check_schedule(both, PAIR)
    assert violation.what == "send and receive number 1 from rank 0 to rank 1 lie on different sides of PAUSE"


def test_collectives_that_fit_no_order_are_told_of_once() -> None:
    """Stage 0 alone has a collective over pp, in front of which stage 1 stands for ever."""
    one = first(edited(FIRST, ("LAUNCH all_reduce sum tp", "LAUNCH all_reduce sum pp")))
    whats = [each.what for each in check_schedule({0: one, 1: one, 2: last(), 3: last()}, MESH)]
    assert whats == ["deadlock: nobody can advance"]


def test_the_check_passes_exactly_what_virtual_ranks_run_to_the_end() -> None:
    """Random launches and waits of two ranks: the static check and the run agree."""
    generator, outcomes = random.Random(0), set[bool]()
    for _ in range(300):
        texts = [_shuffled(generator, rank) for rank in (0, 1)]
        schedules = [Schedule(parse(text), {}, (), (), Signature((), ()), buffers_of(text, {"b": LAYOUT})) for text in texts]
        stuck = any("deadlock" in each.what for each in check_schedule(dict(enumerate(schedules)), PAIR))
        assert stuck == _deadlocks(schedules), "\n---\n".join(texts)
        outcomes.add(stuck)
    assert outcomes == {True, False}


def _shuffled(generator: random.Random, rank: int) -> str:
    """Two sends and two receives, launched in the order of the channels, waited for anywhere after."""
    peer, sends, receives = 1 - rank, [f"{rank}>{k}" for k in (0, 1)], [f"{1 - rank}>{k}" for k in (0, 1)]
    lists = [[f"SEND {name} pp={peer} (a)" for name in sends], [f"RECV {name} pp={peer} (b@{name[2:]})" for name in receives]]
    lines: list[str] = []
    waits: list[str] = []
    while lists or waits:
        if waits and (not lists or generator.random() < 0.5):
            lines.append(f"WAIT {waits.pop(generator.randrange(len(waits)))}")
            continue
        row = generator.choice(lists)
        lines.append(row.pop(0))
        waits.append(lines[-1].split()[1])
        lists = [each for each in lists if each]
    return "\n".join(lines)


def _deadlocks(schedules: list[Schedule]) -> bool:
    rendezvous = Rendezvous(PAIR)
    states = [RankState({"a": torch.zeros(4, 4)}) for _ in schedules]
    fragments = CompiledFragments({}, "eager")
    ranks = [execute(schedule, states[rank], fragments, VirtualTransport(rendezvous, rank)) for rank, schedule in enumerate(schedules)]
    try:
        drive(ranks)
    except ScheduleError as error:
        assert "deadlock" in str(error)
        return True
    rendezvous.check_empty()
    return False
