"""When a memory is away: behind its last use, until shortly before the next, and few are on their way at a time."""

from __future__ import annotations

import torch

from autopar.ir.schedule import Schedule
from autopar.pipeline.stays import Stay, Trip, moved, stays, trips, waiting_seconds
from tests.support.schedules import buffers_of, schedule_of

STEP = """
RUN f1 (x) -> (a)
RUN f2 (a) -> (b)
RUN f3 (b) -> (c)
RUN f4 (c) -> (d)
RUN g4 (d, c) -> (gd)
RUN g3 (gd, b) -> (gc)
RUN g2 (gc, a) -> (gb)
"""
STARTS = [float(number) for number in range(8)]


def step(text: str = STEP, saved: str = "a b c", outputs: str = "gb", size: int = 4) -> Schedule:
    schedule = schedule_of(text, "x", outputs)
    types = {name: ((size,), torch.float32) for name in schedule.buffers}
    table = {name: each._replace(role="saved" if name in saved.split() else "value") for name, each in buffers_of(text, types).items()}
    return Schedule(schedule.instructions, {}, schedule.inputs, schedule.outputs, schedule.signature, table)


def test_what_is_saved_stays_away_between_its_uses() -> None:
    assert stays(step(), STARTS, 0) == [Stay(("a",), 16, 1, 6), Stay(("b",), 16, 2, 5)]
    assert not stays(step(), STARTS, 17)  # too small
    assert stays(step(saved="b"), STARTS, 0) == [Stay(("b",), 16, 2, 5)]
    assert stays(step(outputs="gb a"), STARTS, 0) == [Stay(("b",), 16, 2, 5)]  # handed out


def test_what_is_under_way_is_in_use() -> None:
    text = STEP.replace("RUN f3", "SEND t pp=1 (a)\nRUN f3").replace("RUN g3", "WAIT t\nRUN g3")
    found = {each.names: (each.left, each.needed) for each in stays(step(text), [float(number) for number in range(10)], 0)}
    assert found == {("a",): (6, 8), ("b",): (3, 7)}


def test_copies_take_their_time() -> None:
    found = trips([Stay(("a",), 16, 1, 6), Stay(("b",), 16, 2, 5)], STARTS, lambda size: 0.5)
    assert found == [Trip(("a",), 2, 3, 5, 6), Trip(("b",), 3, 4, 4, 5)]
    # Nothing is gone before it must be back: it stays.
    assert trips([Stay(("a",), 16, 1, 6)], STARTS, lambda size: 10.0) == []


def test_a_few_are_on_their_way_at_a_time() -> None:
    """With copies as slow as this each would be waited for at its very end."""
    many = [Stay((name,), 16, number, 20 - number) for number, name in enumerate("abcd")]
    found = trips(many, [float(number) for number in range(22)], lambda size: 3.0)
    for number in range(21):
        leaving = [each for each in found if each.out <= number < each.gone]
        coming = [each for each in found if each.back <= number < each.needed]
        assert len(leaving) <= 2 and len(coming) <= 2


def test_what_is_written() -> None:
    schedule = step()
    found = moved(schedule, [Trip(("a",), 2, 3, 5, 6), Trip(("b",), 3, 4, 4, 5)], "host")
    assert str(found).splitlines() == [
        "RUN f1 (x) -> (a)",
        "RUN f2 (a) -> (b)",
        "COPY host (a) -> (a.host)",
        "RUN f3 (b) -> (c)",
        "WAIT a.host",
        "COPY host (b) -> (b.host)",
        "RUN f4 (c) -> (d)",
        "WAIT b.host",
        "COPY device (b.host) -> (b.back)",
        "RUN g4 (d, c) -> (gd)",
        "COPY device (a.host) -> (a.back)",
        "WAIT b.back",
        "RUN g3 (gd, b.back) -> (gc)",
        "WAIT a.back",
        "RUN g2 (gc, a.back) -> (gb)",
    ]
    assert found.buffers["a.host"].memory == "host" and found.buffers["a.back"].memory == "device"
    assert "a.host" not in schedule.buffers


def test_what_waits_for_copies_is_told_before_they_are_written() -> None:
    """Copies of two seconds each, instructions of one: the second out waits for the first, and so do those back."""
    starts = [float(number) for number in range(21)]
    pair = [Trip(("a",), 1, 2, 9, 10), Trip(("b",), 1, 6, 9, 14)]
    assert waiting_seconds(pair, starts, lambda trip: 2.0) == 2.0  # one for a, out; one for a, back
    assert waiting_seconds(pair[1:], starts, lambda trip: 2.0) == 0.0
    assert waiting_seconds([Trip(("a",), 1, 1, 5, 5)], starts, lambda trip: 2.0) == 4.0
    assert waiting_seconds([], starts, lambda trip: 2.0) == 0.0
