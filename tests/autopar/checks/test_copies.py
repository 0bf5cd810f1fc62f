"""Each misuse of what is copied to host memory and back is named."""

from __future__ import annotations

import pytest
import torch

from autopar.checks.buffers import check_buffers
from autopar.ir.instructions import parse
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule
from tests.support.schedules import buffers_of, schedule_of

MESH = Mesh((("dp", 2),))
SOUND = """
RUN e () -> (x)
RUN f (x) -> (h)
COPY host (h) -> (h.host)
WAIT h.host
FREE h
COPY device (h.host) -> (h.back)
WAIT h.back
FREE h.host
RUN g (h.back) -> (y)
FREE h.back x y
"""


def found(*changes: tuple[str, str], shapes: dict[str, tuple[int, ...]] | None = None) -> list[str]:
    text = SOUND
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    schedule = schedule_of(text)
    types = {name: ((shapes or {}).get(name, (4,)), torch.float32) for name in schedule.buffers}
    table = {name: each._replace(memory="host" if name.endswith(".host") else "device") for name, each in buffers_of(text, types).items()}
    one = Schedule(schedule.instructions, {}, schedule.inputs, schedule.outputs, schedule.signature, table)
    return [each.what for each in check_buffers(0, one, MESH, actions={"e", "f", "g"})]


def test_a_sound_trip_passes_and_reads_back() -> None:
    assert found() == []
    assert "\n".join(map(str, parse(SOUND))) == SOUND.strip()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ([("WAIT h.host\nFREE h\n", "FREE h\nWAIT h.host\n")], "buffer h is freed while a copy uses it"),
        ([("RUN g (h.back)", "RUN g (h)")], "buffer h is read after it was freed"),
        ([("RUN g (h.back)", "RUN g (h.host)")], "buffer h.host lies in host memory"),
        ([("WAIT h.back\n", "")], "the copy into h.back is never waited for"),
        ([("WAIT h.back\nFREE h.host\nRUN g (h.back) -> (y)\n", "RUN g (h.back) -> (y)\nWAIT h.back\nFREE h.host\n")],
         "buffer h.back is read before its copy is complete"),
        ([("FREE h.host\n", "")], "buffers are never freed"),
        ([("COPY host (h)", "COPY file (h)")], "h is not copied where it should be"),
        ([("COPY device (h.host)", "COPY host (h.host)")], "h.host is not copied where it should be"),
        ([("COPY host (h) ->", "COPY host (h, x) ->")], "a copy has one target for each source"),
    ],
)  # fmt: skip
def test_misuse(changes: list[tuple[str, str]], what: str) -> None:
    assert what in found(*changes)


def test_shapes_stay() -> None:
    assert found(shapes={"h.host": (2, 2), "h.back": (2, 2)})[0] == "h.host is no copy of h"
