"""The check of schedules names buffers misused, collectives that do not meet, and deadlocks: one refusal test for each message."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule

from autopar._torch import fake_mode
from autopar.errors import ScheduleError
from autopar.ir.instructions import parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Output, Signature
from autopar.ir.schedule import Fragment, Schedule
from tests.support.schedules import buffers_of, check_schedules, retyped

aten = torch.ops.aten
MESH = Mesh((("dp", 2), ("tp", 2)))


SOUND = """
RUN f0 (x, w) -> (h)
LAUNCH all_reduce sum tp (h) -> r
WAIT r
FREE h
RUN f1 (r) -> (total)
LAUNCH all_reduce sum dp (total) -> loss
FREE r
WAIT loss
FREE total
PAUSE
RUN f1 (tangent) -> (gradient)
"""


def schedule(text: str) -> Schedule:
    two, one = _fragment_module(2), _fragment_module(1)
    shapes = {name: ((4, 4), torch.float32) for name in ("x", "w", "h", "r", "total", "loss", "gradient", "tangent", "s", "t")}
    signature = Signature(
        (
            Input("batch", "0", (4, 4), torch.float32),
            Input("parameter", "w", (4, 4), torch.float32, True),
            Input("tangent", "0", (4, 4), torch.float32),
        ),
        (Output("loss", "0", (4, 4), torch.float32), Output("gradient", "w", (4, 4), torch.float32)),
    )
    fragments = {"f0": Fragment("f0", two), "f1": Fragment("f1", one)}
    return Schedule(parse(text), fragments, ("x", "w", "tangent"), ("loss", "gradient"), signature, buffers_of(text, shapes))


def _fragment_module(count: int) -> GraphModule:
    graph = Graph()
    nodes = [graph.placeholder(f"a{i}") for i in range(count)]
    with fake_mode():
        for node in nodes:
            node.meta["val"] = torch.empty(4, 4)
    graph.output((nodes[0],))
    return GraphModule(torch.nn.Module(), graph)


def test_a_sound_schedule_passes_alone_and_on_separate_ranks() -> None:
    check_schedules([schedule(SOUND)] * 4, MESH)
    check_schedules([schedule(SOUND) for _ in range(4)], MESH)


def _edit(old: str, new: str) -> str:
    assert old in SOUND
    return SOUND.replace(old, new)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_edit("RUN f0 (x, w) -> (h)\n", ""), "buffer h is read before anything wrote it"),
        (_edit("WAIT r\nFREE h\n", "WAIT r\nFREE h r\n"), "buffer r is read after it was freed"),
        (_edit("RUN f1 (r) -> (total)", "RUN f1 (r) -> (r)"), "buffer r is written twice"),
        (_edit("FREE total\n", "FREE total\nFREE total\n"), "buffer total is freed twice"),
        (_edit("FREE total\n", "FREE total s\n"), "buffer s is freed before anything wrote it"),
        (_edit("FREE total\n", ""), "buffers are never freed"),
        (_edit("WAIT r\nFREE h\n", "FREE h\n"), "buffer h is freed while a collective uses it"),
        (_edit("WAIT r\nFREE h\n", "FREE h\n"), "buffer r is read before its collective is complete"),
        (_edit("WAIT r\n", "WAIT r\nWAIT r\n"), "WAIT without a LAUNCH for r"),
        (_edit("WAIT loss\nFREE total\n", ""), "the collective into loss is never waited for"),
        (_edit("WAIT loss\nFREE total\n", ""), "loss '0' (buffer loss) is not there"),
        (_edit("RUN f1 (tangent) -> (gradient)\n", ""), "gradient 'w' (buffer gradient) is not there"),
        (_edit("PAUSE\n", "PAUSE\nPAUSE\n"), "PAUSE comes twice"),
        (
            _edit("PAUSE\nRUN f1 (tangent) -> (gradient)\n", "RUN f1 (tangent) -> (gradient)\nPAUSE\nRUN f1 (x) -> (s)\nFREE s\n"),
            "buffer tangent is read before anything wrote it",
        ),
        (_edit("RUN f1 (r)", "RUN f9 (r)"), "there is no fragment f9"),
        (_edit("RUN f1 (r)", "RUN f0 (r)"), "the fragment takes another number of inputs"),
        (_edit("sum tp", "sum ep"), "unknown axis 'ep'"),
        (_edit("all_reduce sum tp", "all_gather copy tp"), "the target does not have the collective's shape"),
        (_edit("all_reduce sum tp", "reduce_scatter sum tp"), "reduce_scatter wants one entry per rank first"),
        (_edit("all_reduce sum tp", "all_reduce sum tp by 2"), "only gathers and scatters go by node"),
        (_edit("all_reduce sum tp", "all_gather copy tp by 2"), "nodes have equally many ranks of a group"),
        (_edit("all_reduce sum tp", "all_gather copy tp by 3"), "nodes have equally many ranks of a group"),
    ],
)
def test_refuses_a_schedule(text: str, expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_schedules([schedule(text)] * 4, MESH)
    assert expected in str(caught.value)


def test_names_rank_and_instruction() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0, instruction 3: WAIT r: WAIT without a LAUNCH"):
        check_schedules([schedule(_edit("WAIT r\n", "WAIT r\nWAIT r\n"))] * 4, MESH)


def test_refuses_a_fragment_fed_with_another_shape() -> None:
    wrong = schedule(SOUND)
    with pytest.raises(ScheduleError, match="buffer x does not fit the fragment's input"):
        check_schedules([retyped(wrong, {"x": ((4, 5), torch.float32)})] * 4, MESH)


def test_refuses_ranks_without_a_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"ranks without a schedule"):
        check_schedules([schedule(SOUND)] * 3, MESH)


TWO = """
RUN f0 (x, w) -> (h)
LAUNCH all_reduce sum tp (h) -> r
LAUNCH all_reduce sum dp (h) -> loss
WAIT r
WAIT loss
FREE h r
PAUSE
RUN f1 (tangent) -> (gradient)
"""
_FIRST, _SECOND = "LAUNCH all_reduce sum tp (h) -> r\n", "LAUNCH all_reduce sum dp (h) -> loss\n"


def _ranks(other: str) -> list[Schedule]:
    """Rank 0 runs `other`, ranks 1 to 3 run TWO."""
    return [schedule(other), *(schedule(TWO) for _ in range(3))]


def test_swapped_order_across_groups_is_a_deadlock_and_names_ranks_and_instructions() -> None:
    swapped = TWO.replace(_FIRST + _SECOND, _SECOND + _FIRST)
    with pytest.raises(ScheduleError) as caught:
        check_schedules([schedule(text) for text in (swapped, TWO, TWO, swapped)], MESH)
    text = str(caught.value)
    assert "deadlock: nobody can advance" in text
    assert "rank 0, instruction 1: LAUNCH all_reduce sum dp (h) -> loss waits for rank 2" in text
    assert "rank 1, instruction 1: LAUNCH all_reduce sum tp (h) -> r waits for rank 0" in text


def test_orders_that_fit_one_global_order_pass() -> None:
    """Rank 0 alone swapped: tp of (2, 3), dp of (0, 2), tp of (0, 1), dp of (1, 3) is an order for all."""
    check_schedules(_ranks(TWO.replace(_FIRST + _SECOND, _SECOND + _FIRST)), MESH)


def test_a_missing_launch_on_one_rank_is_a_deadlock() -> None:
    text = TWO.replace(_FIRST, "RUN f1 (h) -> (r)\n").replace("WAIT r\n", "")
    with pytest.raises(ScheduleError, match="nobody can advance"):
        check_schedules(_ranks(text), MESH)


def test_a_missing_pause_on_one_rank_is_a_deadlock() -> None:
    alone = schedule(TWO)
    without = replace(
        alone, instructions=tuple(each for each in alone.instructions if str(each) not in ("PAUSE", "RUN f1 (tangent) -> (gradient)"))
    )
    forward = replace(without, signature=replace(alone.signature, outputs=alone.signature.outputs[:1]), outputs=("loss",))
    with pytest.raises(ScheduleError, match="PAUSE waits for ranks 0, 2, 3"):
        check_schedules([forward, *(schedule(TWO) for _ in range(3))], MESH)


@pytest.mark.parametrize(
    ("other", "shapes"),
    [
        (TWO.replace("sum tp", "max tp"), {}),
        (TWO, {"h": ((4, 4), torch.float16), "r": ((4, 4), torch.float16), "loss": ((4, 4), torch.float16)}),
        (TWO, {"h": ((2, 8), torch.float32), "r": ((2, 8), torch.float32), "loss": ((2, 8), torch.float32)}),
    ],
)
def test_refuses_different_collectives_within_a_group(other: str, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    first = schedule(other)
    fragments = {name: Fragment(name, _untyped(each)) for name, each in first.fragments.items()}
    first = replace(retyped(first, shapes), fragments=fragments)
    with pytest.raises(ScheduleError, match="two ranks of a group launch different collectives"):
        check_schedules([first, *(schedule(TWO) for _ in range(3))], MESH)


def _untyped(fragment: Fragment) -> GraphModule:
    """The fragment's module without values, so that other shapes fit it."""
    for node in fragment.module.graph.nodes:
        node.meta.pop("val", None)
    return fragment.module
