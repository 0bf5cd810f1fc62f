"""Each misuse of what is copied to host memory and back is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.checks.buffers import check_buffers
from autopar.checks.copies import check_copies, check_round_trips
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


def schedule(text: str, shapes: dict[str, tuple[int, ...]] | None = None) -> Schedule:
    """`h.host` and `h.back` stand for what `h` stands for."""
    plain = schedule_of(text)
    types = {name: ((shapes or {}).get(name, (4,)), torch.float32) for name in plain.buffers}
    table = {
        name: each._replace(value=name.split(".")[0], memory="host" if name.endswith(".host") else "device")
        for name, each in buffers_of(text, types).items()
    }
    return Schedule(plain.instructions, {}, plain.inputs, plain.outputs, plain.signature, table)


def found(*changes: tuple[str, str], shapes: dict[str, tuple[int, ...]] | None = None, text: str = SOUND) -> list[str]:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    one = schedule(text, shapes)
    violations = [*check_buffers(0, one, MESH, actions={"e", "f", "g"}), *check_copies(0, one)]
    return [each.what for each in violations]


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
        ([("WAIT h.host\nFREE h\nCOPY device (h.host) -> (h.back)\n", "COPY device (h.host) -> (h.back)\nWAIT h.host\nFREE h\n")],
         "buffer h.host is read before its copy is complete"),
        ([("WAIT h.back\nFREE h.host\n", "FREE h.host\nWAIT h.back\n")], "buffer h.host is freed while a copy uses it"),
        ([("FREE h.host\n", "")], "buffers are never freed"),
        ([("COPY host (h)", "COPY file (h)")], "h is not copied where it should be"),
        ([("COPY device (h.host)", "COPY host (h.host)")], "h.host is not copied where it should be"),
        ([("COPY host (h) ->", "COPY host (h, x) ->")], "a copy has one target for each source"),
    ],
)  # fmt: skip
def test_misuse(changes: list[tuple[str, str]], what: str) -> None:
    assert what in found(*changes)


# Two of one shape and dtype: nothing but what they stand for tells them apart.
PAIR = """
RUN e () -> (h, k)
COPY host (h) -> (h.host)
COPY host (k) -> (k.host)
WAIT h.host
WAIT k.host
FREE h k
COPY device (h.host) -> (h.back)
COPY device (k.host) -> (k.back)
WAIT h.back
WAIT k.back
FREE h.host k.host
RUN g (h.back, k.back) -> (y)
FREE h.back k.back y
"""


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ([("(h) -> (h.host)", "(h) -> (?)"), ("(k) -> (k.host)", "(k) -> (h.host)"), ("(?)", "(k.host)")],
         "k.host is copied from h, which is another value"),
        ([("-> (h.back)", "-> (?)"), ("-> (k.back)\nW", "-> (h.back)\nW"), ("(?)", "(k.back)")],
         "k.back is copied from h.host, which is another value"),
        ([("COPY device (h.host)", "COPY device (k.host)")], "h.back is copied from k.host, which is another value"),
    ],
)  # fmt: skip
def test_what_comes_back_is_what_was_put_away(changes: list[tuple[str, str]], what: str) -> None:
    assert found(text=PAIR) == []
    assert what in found(*changes, text=PAIR)


def test_microbatches_are_told_apart() -> None:
    one = schedule(PAIR)
    table = {name: each._replace(value="h", microbatch=int(name.startswith("k"))) for name, each in one.buffers.items()}
    assert check_copies(0, replace(one, buffers=table)) == []
    mixed = table | {"k.back": table["k.back"]._replace(microbatch=0)}
    (violation,) = check_copies(0, replace(one, buffers=mixed))
    assert (violation.expected, violation.got) == ("h of microbatch 0 (value)", "h of microbatch 1 (value)")
    assert violation.where == "rank 0, instruction 7: COPY device (k.host) -> (k.back)"


BEFORE = "RUN e () -> (h, k)\nRUN g (h, k) -> (y)"
TRIPS = PAIR.replace("FREE h k\n", "").replace("FREE h.host k.host\n", "").replace("FREE h.back k.back y\n", "")


@pytest.mark.parametrize(
    ("old", "new", "got"),
    [
        ("", "", None),
        ("RUN g (h.back, k.back)", "RUN g (k.back, h.back)", "RUN g (k, h) -> (y)"),
        ("RUN g (h.back, k.back)", "RUN g (h.back, h.back)", "RUN g (h, h) -> (y)"),
        ("RUN g (h.back, k.back) -> (y)", "", "nothing more"),
        ("RUN g (h.back, k.back) -> (y)", "RUN g (h.back, k.back) -> (y)\nRUN g (h, k) -> (z)", "RUN g (h, k) -> (z)"),
    ],
)
def test_without_its_copies_it_is_what_it_was(old: str, new: str, got: str | None) -> None:
    violations = check_round_trips([schedule(BEFORE)], [schedule(TRIPS.replace(old, new) if old else TRIPS)])
    assert [each.got for each in violations] == ([got] if got else [])
    # Copies were there before, if not at each place.
    assert check_round_trips([schedule(TRIPS), schedule(BEFORE)], [schedule(PAIR), schedule("RUN f () -> (h)")]) == []


def test_shapes_stay() -> None:
    assert found(shapes={"h.host": (2, 2), "h.back": (2, 2)})[-1] == "h.host is no copy of h"
