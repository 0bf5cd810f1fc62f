"""Each buffer is freed behind the last instruction that has to do with it, and fragments are numbered as they run."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule
from autopar.passes.schedule.free_buffers import FreeBuffers
from tests.support.schedules import schedule_of, whole


def freed(*schedules: Schedule) -> list[list[str]]:
    given = whole(Mesh((("pp", len(schedules)), ("dp", 2))), *schedules)
    program = FreeBuffers().apply(replace(given, is_executable=False))
    assert program.is_executable
    return [str(schedule).splitlines() for schedule in program.places]


def schedule(text: str, inputs: str = "", outputs: str = "") -> Schedule:
    return schedule_of(text, inputs, outputs, twice=lambda x: (x * 2,), once=lambda x: (x * 1,))


def test_a_buffer_goes_behind_its_last_use_and_inputs_and_outputs_stay() -> None:
    found = freed(schedule("RUN twice (x) -> (a)\nRUN once (a) -> (b)\nRUN twice (b) -> (y)\nPAUSE", "x", "y"))
    assert found == [["RUN f0 (x) -> (a)", "RUN f1 (a) -> (b)", "FREE a", "RUN f0 (b) -> (y)", "FREE b", "PAUSE"]]


def test_what_is_launched_is_in_use_until_its_wait() -> None:
    text = "RUN once (x) -> (a)\nLAUNCH all_reduce sum dp (a) -> r\nRUN once (x) -> (c)\nWAIT r\nRUN once (r) -> (d)"
    (found,) = freed(schedule(text, "x", "d"))
    assert found[2:] == ["RUN f0 (x) -> (c)", "FREE c", "WAIT r", "FREE a", "RUN f0 (r) -> (d)", "FREE r"]


def test_what_is_added_goes_and_the_sum_stays_until_it_is_read() -> None:
    (found,) = freed(schedule("RUN once (x) -> (a)\nADD s (a)\nRUN twice (x) -> (b)\nADD s (b)\nRUN once (s) -> (y)", "x", "y"))
    assert found == [
        "RUN f0 (x) -> (a)", "ADD s (a)", "FREE a", "RUN f1 (x) -> (b)", "ADD s (b)", "FREE b", "RUN f0 (s) -> (y)", "FREE s",
    ]  # fmt: skip


def test_fragments_are_numbered_over_all_places() -> None:
    first = schedule("RUN twice (x) -> (a)\nSEND t pp=1 (a)\nWAIT t", "x")
    last = replace(schedule("RECV t pp=0 (a)\nWAIT t\nRUN once (a) -> (b)\nRUN twice (b) -> (y)", "", "y"), fragments=first.fragments)
    found = freed(first, last)
    assert found[0] == ["RUN f0 (x) -> (a)", "SEND t pp=1 (a)", "WAIT t", "FREE a"]
    assert found[1][2:] == ["RUN f1 (a) -> (b)", "FREE a", "RUN f0 (b) -> (y)", "FREE b"]
