"""Actions that take turns, on a clock by hand: a fragment takes a second, a collective half of one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.instructions import Launch
from autopar.ir.schedule import Schedule, Span
from autopar.pipeline.in_turns import in_turns
from tests.support.schedules import schedule_of

BACKWARD = ["RUN b0 (t@0) -> (b@0)", "LAUNCH all_reduce sum tp (b@0) -> g@0", "WAIT g@0", "RUN b1 (g@0) -> (d@0)", "ADD s (d@0)"]
FORWARD = ["RUN f0 (x@1) -> (a@1)", "LAUNCH all_reduce sum tp (a@1) -> h@1", "WAIT h@1", "RUN f1 (h@1) -> (l@1)"]


def lines(first: str, second: str, between: list[str] | None = None, backward: list[str] = BACKWARD) -> list[str]:
    """What stands where, of a backward, what is `between`, and a forward, that are called so."""
    end = len(backward)
    rows = [*backward, *(between or []), *FORWARD]
    spans = (Span(first, 0, end), Span(second, end + len(between or []), len(rows)))
    given: Schedule = replace(schedule_of("\n".join(rows), "x@1 t@0"), spans=spans)
    order = in_turns(given, lambda each: 0.5 if isinstance(each, Launch) else 1.0, ",".join)
    assert sorted(order) == list(range(len(rows)))
    return [str(given.instructions[number]) for number in order]


def test_one_computes_while_the_collective_of_the_other_moves() -> None:
    assert lines("0B0", "0F1") == [
        "RUN b0 (t@0) -> (b@0)",
        "LAUNCH all_reduce sum tp (b@0) -> g@0",
        "RUN f0 (x@1) -> (a@1)",
        "LAUNCH all_reduce sum tp (a@1) -> h@1",
        "WAIT g@0",
        "RUN b1 (g@0) -> (d@0)",
        "ADD s (d@0)",
        "WAIT h@1",
        "RUN f1 (h@1) -> (l@1)",
    ]


def test_who_can_go_on_does_not_wait_for_a_long_collective_of_the_other() -> None:
    found = lines("0B0", "0F1", backward=[*BACKWARD[:2], "LAUNCH all_reduce sum tp (b@0) -> k@0", "WAIT k@0", *BACKWARD[2:]])
    assert found.index("RUN f0 (x@1) -> (a@1)") < found.index("WAIT k@0")


@pytest.mark.parametrize(("second", "between"), [("0F0", None), ("0F1", ["PAUSE"])])
def test_actions_of_one_microbatch_and_on_both_sides_of_pause_stay_as_they_are(second: str, between: list[str] | None) -> None:
    assert lines("0B0", second, between) == [*BACKWARD, *(between or []), *FORWARD]


def test_sums_are_added_up_in_their_order() -> None:
    """The second action has no collective, and is at its ADD long before the first."""
    second = ["RUN f0 (x@1) -> (a@1)", "ADD s (a@1)", "RUN f1 (a@1) -> (l@1)"]
    rows = [*BACKWARD, *second]
    given = replace(schedule_of("\n".join(rows), "x@1 t@0"), spans=(Span("0B0", 0, 5), Span("0B1", 5, 8)))
    order = in_turns(given, lambda each: 9.0 if isinstance(each, Launch) else 1.0, ",".join)
    found = [str(given.instructions[number]) for number in order]
    assert found.index("RUN f0 (x@1) -> (a@1)") < found.index("RUN b1 (g@0) -> (d@0)")
    assert found.index("ADD s (d@0)") < found.index("ADD s (a@1)") < found.index("RUN f1 (a@1) -> (l@1)")
