"""When parameters are on the device: ahead of their first reader, until behind the last for a while, and at no PAUSE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.checks.buffers import check_buffers
from autopar.checks.copies import check_copies
from autopar.ir.instructions import parse
from autopar.ir.lifetimes import with_frees
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Input, Output, Signature
from autopar.ir.schedule import Schedule
from autopar.pipeline.visits import Visit, joined, most_needed_bytes, parameters_of, read_spans, table_of, visited, visits
from tests.support.schedules import buffers_of, schedule_of

STEP = """
RUN f1 (x, v) -> (a)
RUN f2 (a, w) -> (b)
RUN f3 (b, w) -> (c)
PAUSE
RUN g3 (t, c, w) -> (gb)
RUN g1 (gb, v) -> (gv)
"""
STARTS = [0.0, 1.0, 2.0, 3.0, 3.0, 4.0, 5.0]
MESH = virtual_mesh(dp=2)


def step(text: str = STEP, size: int = 4) -> Schedule:
    schedule = schedule_of(text, "x v w t", "gv")
    types = {name: ((size,), torch.float32) for name in schedule.buffers}
    kinds = {"x": "batch", "v": "parameter", "w": "parameter", "t": "tangent"}
    kind: Any = kinds.__getitem__
    items = tuple(Input(kind(name), name, (size,), torch.float32) for name in kinds)
    results = (Output("gradient", "v", (size,), torch.float32),)
    roles: Any = kinds
    table = {name: each._replace(role=roles.get(name, "value")) for name, each in buffers_of(text, types).items()}
    return Schedule(schedule.instructions, {}, schedule.inputs, schedule.outputs, Signature(items, results), table)


def chosen(schedule: Schedule, seconds: float = 0.5, ahead_bytes: float = 32) -> list[Visit]:
    spans = {name: joined(each, lambda one, other: False) for name, each in read_spans(schedule).items()}
    return visits(schedule, spans, STARTS, lambda size: seconds, ahead_bytes)


def test_neighbours_are_one_stay() -> None:
    assert parameters_of(step()) == ["v", "w"]
    spans = read_spans(step())
    assert spans == {"v": [(0, 0), (5, 5)], "w": [(1, 1), (2, 2), (4, 4)]}
    assert joined(spans["w"], lambda one, other: False) == [(1, 2), (4, 4)]
    assert joined(spans["w"], lambda one, other: True) == [(1, 4)]
    assert most_needed_bytes(step(), {"v": [(0, 0)], "w": [(0, 2), (4, 4)]}) == 32


def test_what_is_under_way_is_read() -> None:
    text = STEP.replace("RUN f3 (b, w)", "LAUNCH all_reduce sum dp (w) -> k\nRUN f3 (b)").replace("PAUSE", "WAIT k\nPAUSE")
    assert read_spans(step(text))["w"] == [(1, 1), (2, 4), (6, 6)]


def test_copies_start_in_time_and_not_before_a_pause() -> None:
    assert chosen(step(), 0.25) == [Visit("v", 0, 0, 0), Visit("v", 4, 5, 5), Visit("w", 0, 1, 2), Visit("w", 4, 4, 4)]
    # With slow copies all start as early as they may.
    assert chosen(step(), 9.0) == [Visit("v", 0, 0, 0), Visit("v", 4, 5, 5), Visit("w", 0, 1, 2), Visit("w", 4, 4, 4)]


def test_no_more_come_ahead_than_there_is_room_for() -> None:
    names = [f"w{number}" for number in range(20)]
    text = "\n".join(f"RUN f (h{number}, w{number}) -> (h{number + 1})" for number in range(20))
    schedule = schedule_of(text, " ".join(names))
    types = {name: ((4,), torch.float32) for name in schedule.buffers}
    schedule = replace(schedule, buffers=buffers_of(text, types))
    spans = {name: [(number, number)] for number, name in enumerate(names)}
    starts = [float(number) for number in range(21)]
    for room in (16, 48):
        found = visits(schedule, spans, starts, lambda size: 3.0, room)
        ahead = [sum(each.copied <= number < each.needed for each in found) for number in range(20)]
        assert max(ahead) == room / 16


def test_what_is_written() -> None:
    schedule = step()
    found = visited(schedule, chosen(schedule), "host")
    assert str(found).splitlines() == [
        "COPY device (v) -> (v.here1)",
        "COPY device (w) -> (w.here1)",
        "WAIT v.here1",
        "RUN f1 (x, v.here1) -> (a)",
        "WAIT w.here1",
        "RUN f2 (a, w.here1) -> (b)",
        "RUN f3 (b, w.here1) -> (c)",
        "PAUSE",
        "COPY device (w) -> (w.here2)",
        "COPY device (v) -> (v.here2)",
        "WAIT w.here2",
        "RUN g3 (t, c, w.here2) -> (gb)",
        "WAIT v.here2",
        "RUN g1 (gb, v.here2) -> (gv)",
    ]
    assert {name: found.memory_of(name) for name in ("v", "w", "x", "w.here2")} == {
        "v": "host", "w": "host", "x": "device", "w.here2": "device",
    }  # fmt: skip
    assert schedule.memory_of("w") == "device" and found.buffers["w.here1"].role == "parameter"
    assert table_of(schedule, [], "file")["w"].memory == "file"


def proved(old: str = "", new: str = "") -> str:
    """What is wrong with the schedule of `test_what_is_written`, with its FREEs, once a part of its text is another."""
    found = visited(step(), chosen(step()), "host")
    text = str(found.regrouped(with_frees(found.instructions, {*found.inputs, *found.outputs})))
    assert old in text
    one = replace(found, instructions=tuple(parse(text.replace(old, new, 1) if old else text)))
    fragments = {each.split()[1] for each in text.splitlines() if each.startswith("RUN")}
    return "\n".join(each.what for each in (*check_buffers(0, one, MESH, fragments), *check_copies(0, one)))


def test_the_check_proves_copies_before_reads_and_frees_behind_the_last() -> None:
    assert proved() == ""
    assert "buffer w lies in host memory" in proved("RUN f2 (a, w.here1)", "RUN f2 (a, w)")
    assert "buffer w.here2 is read before its copy is complete" in proved("WAIT w.here2\n", "")
    assert "w.here1 is copied from v, which is another value" in proved("COPY device (w) -> (w.here1)", "COPY device (v) -> (w.here1)")
    assert "buffer w.here1 is read after it was freed" in proved("RUN f3 (b, w.here1)", "FREE w.here1\nRUN f3 (b, w.here1)")
    assert "buffers are never freed" in proved("FREE c w.here2", "FREE c")
