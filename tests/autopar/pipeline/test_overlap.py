"""List schedules on a clock by hand: a fragment takes a second, a gather or a reduction as long as is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.ir.instructions import Launch, Run, Send
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule, Span
from autopar.pipeline.overlap import Haste, ListSchedule, reordered
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import simulate
from tests.support.schedules import retyped, schedule_of, whole

DP2 = Mesh((("dp", 2), ("tp", 2)))
GATHERS = """
RUN f (x) -> (a)
RUN f (a) -> (b)
RUN f (b) -> (c)
RUN lay (p) -> (q)
LAUNCH all_gather copy dp (q) -> w
WAIT w
RUN g (c, w) -> (d)
"""
SUMS = """
RUN f (x) -> (a)
LAUNCH reduce_scatter sum dp (a) -> b
WAIT b
RUN scale (b) -> (e)
ADD s (e)
RUN f (y) -> (c)
RUN f (c) -> (d)
"""


def schedule(text: str, wide: str = "w a") -> Schedule:
    found = schedule_of(text, "x y p")
    return retyped(found, {name: ((8,) if name in wide.split() else (4,), torch.float32) for name in found.buffers})


def ordered(text: str, haste: Haste | None = None, seconds: float = 1.0, wide: str = "w a") -> list[str]:
    """Collectives take `seconds`, what computes an operand nothing."""
    given = schedule(text, wide)

    def price(each: Run | Send | Launch) -> float:
        return seconds if isinstance(each, Launch) else 0.0 if isinstance(each, Run) and each.fragment == "lay" else 1.0

    def unhindered(each: Run | Send | Launch) -> float:
        return 0.0 if isinstance(each, Launch) else price(each)

    (ends,) = simulate(program(given), unhindered, has_memory=False).instruction_seconds
    order = ListSchedule(given, price, ends, ",".join).order(haste or Haste(slack=0.0))
    assert sorted(order) == list(range(len(given.instructions)))
    return [str(each) for each in reordered(given, order).instructions]


def program(schedule: Schedule) -> ScheduleProgram:
    return replace(whole(DP2, schedule), is_executable=False)


@pytest.mark.parametrize(("seconds", "slack", "before"), [(1.0, 0.0, 2), (1.5, 0.0, 1), (1.0, 1.0, 1), (9.0, 0.0, 0)])
def test_a_gather_starts_as_late_as_it_may_with_what_computes_its_operand(seconds: float, slack: float, before: int) -> None:
    found = ordered(GATHERS, Haste(slack), seconds)
    at = found.index("LAUNCH all_gather copy dp (q) -> w")
    assert at == before + 1 and found[at - 1] == "RUN lay (p) -> (q)"
    assert found[-2:] == ["WAIT w", "RUN g (c, w) -> (d)"]


def test_what_waits_for_a_sum_lets_others_go_first_until_it_has_arrived() -> None:
    assert ordered(SUMS, seconds=0.5) == [
        "RUN f (x) -> (a)",
        "LAUNCH reduce_scatter sum dp (a) -> b",
        "RUN f (y) -> (c)",
        "WAIT b",
        "RUN scale (b) -> (e)",
        "ADD s (e)",
        "RUN f (c) -> (d)",
    ]
    assert ordered(SUMS, seconds=9.0)[-3:] == ["WAIT b", "RUN scale (b) -> (e)", "ADD s (e)"]
    assert ordered(SUMS, Haste(postpones=False), seconds=9.0) == [str(each) for each in schedule(SUMS).instructions]


def test_long_chains_that_wait_for_a_sum_are_ordered_in_no_time() -> None:
    """Every layer is read by two instructions of the next: 2^60 ways lead back to the sum."""
    layers = [f"RUN f (v{n}) -> (l{n})\nRUN f (v{n}) -> (r{n})\nRUN f (l{n}, r{n}) -> (v{n + 1})" for n in range(60)]
    text = "\n".join(["RUN f (x) -> (a)", "LAUNCH reduce_scatter sum dp (a) -> v0", "WAIT v0", *layers, "RUN f (y) -> (c)"])
    assert ordered(text, seconds=9.0)[2] == "RUN f (y) -> (c)"


def test_no_more_is_gathered_ahead_than_is_said() -> None:
    """Both gathers would be launched at the start; there is room for one at a time."""
    text = """
    RUN f (x) -> (a)
    LAUNCH all_gather copy dp (p) -> w
    WAIT w
    RUN g (a, w) -> (b)
    LAUNCH all_gather copy dp (y) -> v
    WAIT v
    RUN g (b, v) -> (c)
    """
    gathers = ["LAUNCH all_gather copy dp (p) -> w", "LAUNCH all_gather copy dp (y) -> v"]
    assert ordered(text, seconds=9.0, wide="w v")[:2] == gathers
    found = ordered(text, Haste(ahead_bytes=32.0), 9.0, "w v")
    assert found.index("WAIT w") < found.index(gathers[1])


def test_sends_start_as_soon_as_what_they_carry_is_there_and_receives_are_waited_for_where_they_are_read() -> None:
    text = """
    RECV h pp=1 (g)
    WAIT h
    RUN f (x) -> (a)
    RUN f (y) -> (b)
    SEND k pp=1 (a)
    RUN g (b, g) -> (c)
    WAIT k
    """
    given = schedule(text)
    order = ListSchedule(given, lambda each: 1.0, [0.0, 0.0, 1.0, 2.0, 2.0, 3.0, 3.0], ",".join).order(Haste())
    assert [str(each) for each in reordered(given, order).instructions] == [
        "RECV h pp=1 (g)",
        "RUN f (x) -> (a)",
        "SEND k pp=1 (a)",
        "RUN f (y) -> (b)",
        "WAIT h",
        "RUN g (b, g) -> (c)",
        "WAIT k",
    ]


def test_actions_keep_what_computes_and_lose_what_was_moved_out_of_them() -> None:
    spans = (Span("0F0", 0, 2), Span("0F1", 2, 7))
    given = replace(schedule(GATHERS), spans=spans)
    moved = reordered(given, (3, 4, 0, 1, 2, 5, 6))
    assert [str(each.begin) + str(each.end) for each in moved.spans] == ["24", "47"]
    assert reordered(given, range(7)).spans == (spans[0], Span("0F1", 2, 7))
