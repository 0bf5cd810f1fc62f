"""Schedules as text: what prints parses back, can be edited, and shows where faults are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.ir.actions import Action, Edge, GridCell, PipelineSchedule, check_edges, parse_action, parse_schedule
from autopar.pipeline.schedules import GENERATORS, one_forward_one_backward, zb_h1

PICTURE = """\
pipeline 1f1b: 3 microbatches, stages on ranks 0 1
rank 0 | 0F0 0F1 .   .   0B0 -   0F2 0B1 -   .   0B2 -
rank 1 | .   1F0 1B0 -   1F1 1B1 -   1F2 1B2 -"""


def test_prints_as_a_picture_in_time() -> None:
    assert str(one_forward_one_backward(2, 3)) == PICTURE


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 12), st.integers(1, 30))
def test_what_prints_parses_back(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = GENERATORS[name](num_ranks, num_microbatches)
    assert parse_schedule(str(schedule)) == schedule


def test_columns_and_dots_do_not_matter() -> None:
    edited = "\n pipeline mine: 1 microbatch, stages on ranks 0 1\nrank 1 | 1F0 1I0\n\nrank 0 | 0F0 . . 0B0\nrank 1 | - 1W0\n"
    expected = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)))
    assert parse_schedule(edited) == PipelineSchedule("mine", (0, 1), 1, expected)


def test_an_edit_is_what_it_says() -> None:
    text = str(zb_h1(2, 2)).replace("0I0 0W0", "0B0")
    assert Action(0, "B", 0) in parse_schedule(text).orders[0]


def test_marks_stand_under_their_actions_and_still_parse() -> None:
    schedule = one_forward_one_backward(2, 3)
    text = schedule.grid({GridCell(1, 1): "ERROR 1", GridCell(1, 6): "ERROR 2"})
    row, mark = text.splitlines()[2:4]
    assert row[mark.index("^") :].startswith("1B0")
    assert mark.endswith("<-- ERROR 1; ERROR 2") and mark.count("^^^") == 2
    assert parse_schedule(text) == schedule


def test_long_schedules_wrap_and_say_so_by_rank() -> None:
    text = str(zb_h1(4, 32))
    assert max(map(len, text.splitlines())) <= 140
    assert text.count("rank 3 |") > 1


def test_an_impossible_order_prints_too() -> None:
    schedule = PipelineSchedule("x", (0, 1), 1, ((Action(0, "B", 0), Action(0, "F", 0)), (Action(1, "F", 0), Action(1, "B", 0))))
    text = str(schedule)
    assert "columns are not times" in text
    assert parse_schedule(text) == schedule


def test_an_action_reads_as_torch_writes_it() -> None:
    assert parse_action("12W3") == Action(12, "W", 3) and str(Action(2, "F", 0)) == "2F0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty text is no schedule"),
        ("rank 0 | 0F0", r"line 1 should say `pipeline NAME: N microbatches"),
        ("pipeline x: 1 microbatch, stages on ranks 0\nrank zero | 0F0", "line 2 should be `rank N | actions`"),
        ("pipeline x: 1 microbatch, stages on ranks 0\nrank 0 | 0F0 0X0", "line 2: '0X0' is no action"),
    ],
)
def test_refuses_what_is_no_schedule(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([Edge(1, 1)], "an edge leads from a stage to a later one"),
        ([Edge(0, 3)], "of stages 0 to 2"),
        ([Edge(0, 1), Edge(0, 1, False)], "two edges from stage 0 to stage 1"),
    ],
)
def test_refuses_edges_that_are_none(edges: list[Edge], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_edges(edges, 3)
