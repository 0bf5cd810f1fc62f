"""Each misuse of a buffer by transfers and sums is named; `test_check_schedule` has those by collectives and fragments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.checks.buffers import check_buffers
from autopar.ir.program import Output
from autopar.ir.schedule import Schedule
from tests.support.stage_schedules import FIRST, LAST, LAYOUT, MESH, edited, first, last

F32 = torch.float32


def found(rank: int, schedule: Schedule) -> list[str]:
    return [f"{violation.where}: {violation.what}" for violation in check_buffers(rank, schedule, MESH)]


def test_sound_stages_pass() -> None:
    assert found(0, first()) == [] and found(2, last()) == []


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ([("WAIT 0F0>1\nFREE h@0", "FREE h@0"), ("FREE h@1", "WAIT 0F0>1\nFREE h@1")], 8, "buffer h@0 is freed while a send uses it"),
        ([("WAIT 0F0>1\n", "")], 18, "the send 0F0>1 is never waited for"),
        ([("WAIT 0F0>1\n", "WAIT 0F0>1\nWAIT 0F0>1\n")], 9, "WAIT without a LAUNCH for 0F0>1"),
        ([("SEND 0F1>1", "SEND 0F0>1"), ("WAIT 0F1>1\n", "")], 3, "transfer 0F0>1 is launched twice"),
        (
            [("RUN f2 (x, w) -> (h@0)\nSEND 0F0>1 pp=1 (h@0)", "SEND 0F0>1 pp=1 (h@0)\nRUN f2 (x, w) -> (h@0)")],
            0,
            "h@0 is read before anything",
        ),
        (
            [("0F1>1", "gradient"), ("WAIT gradient\nFREE h@1", "FREE h@1")],
            15,
            "a send and a collective under way are both called gradient",
        ),
        ([("SEND 0F1>1 pp=1 (h@1)", "SEND 0F1>1 pp=1 (h@1, gradient)")], 3, "buffer gradient is read before anything wrote it"),
    ],
)
def test_misused_sends_are_named(changes: list[tuple[str, str]], where: int, what: str) -> None:
    schedule = first(edited(FIRST, *changes))
    assert any(what in each and each.startswith(_place(schedule, 0, where)) for each in found(0, schedule)), found(0, schedule)


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        (
            [("WAIT 0F0>1\nRUN f1 (h@0) -> (d@0)", "RUN f1 (h@0) -> (d@0)\nWAIT 0F0>1")],
            1,
            "buffer h@0 is read before its receive is complete",
        ),
        (
            [("WAIT 0F0>1\nRUN f1 (h@0)", "SEND a pp=0 (h@0)\nWAIT 0F0>1\nWAIT a\nRUN f1 (h@0)")],
            1,
            "h@0 is read before its receive is complete",
        ),
        ([("WAIT 0F0>1\n", "FREE h@0\nWAIT 0F0>1\n")], 1, "buffer h@0 is freed while a receive uses it"),
        ([("pp=0 (h@1)", "pp=0 (h@0)"), ("RUN f1 (h@1)", "RUN f1 (h@0)"), ("h@1 d@1", "d@1")], 4, "buffer h@0 is written twice"),
        ([("pp=0 (h@1)", "pp=0 (h@1, h@2)"), ("h@1 d@1", "h@1 h@2 d@1"), ("h@2", "k@2")], 4, "nothing says how large buffer k@2 is"),
        ([("pp=0 (h@1)", "pp=0 (h@1, h@2)")], 11, "buffers are never freed"),
        ([("WAIT 0F1>1\n", "")], 10, "the receive 0F1>1 is never waited for"),
    ],
)
def test_misused_receives_are_named(changes: list[tuple[str, str]], where: int, what: str) -> None:
    schedule = last(edited(LAST, *changes))
    assert any(what in each and each.startswith(_place(schedule, 2, where)) for each in found(2, schedule)), found(2, schedule)


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ([("ADD g_w (g_w@0)\n", "ADD g_w (g_w@1)\n")], 7, "buffer g_w@1 is read before anything wrote it"),
        (
            [("RUN f1 (d@0) -> (g_w@0)\nADD g_w (g_w@0)", "RUN f1 (d@0) -> (g_w)"), ("d@0 g_w@0", "d@0")],
            12,
            "ADD into buffer g_w, which others",
        ),
        ([("ADD g_w (", "ADD x (")], 7, "ADD into buffer x, which others may share"),
        ([("ADD g_w (g_w@0)", "ADD d@1 (g_w@0)")], 10, "buffer d@1 is written twice"),
        ([("ADD g_w (g_w@1)", "ADD g_w (g_w)")], 13, "buffer g_w is added to itself"),
        ([("RUN f1 (d@1)", "RUN f1 (g_w)")], 13, "buffer g_w is added to after it was read"),
        (
            [("ADD g_w (g_w@1)\n", ""), ("FREE h@1", "ADD g_w (d@1)\nFREE h@1"), ("WAIT 0F1>1", "SEND g pp=1 (g_w)\nWAIT g")],
            15,
            "after it was read",
        ),
        ([("h@0 d@0", "g_w h@0 d@0")], 13, "buffer g_w is added to after it was freed"),
        ([("ADD g_w (g_w@1)\n", "ADD w@ (g_w@1)\n")], 19, "buffers are never freed"),
    ],
)
def test_misused_sums_are_named(changes: list[tuple[str, str]], where: int, what: str) -> None:
    schedule = first(edited(FIRST, *changes))
    assert any(what in each and each.startswith(_place(schedule, 0, where)) for each in found(0, schedule)), found(0, schedule)


def test_a_sum_of_another_shape_or_dtype_is_named() -> None:
    for layout in (((4, 1), F32), ((4, 4), torch.bfloat16)):
        violations = check_buffers(0, first(FIRST, **{"g_w@1": layout}), MESH)
        assert [violation.what for violation in violations] == ["buffers g_w and g_w@1 cannot be added"]
        assert violations[0].expected == "f32[4, 4]" and violations[0].got in ("f32[4, 1]", "bf16[4, 4]")


def test_what_was_handed_out_at_pause_is_added_to_no_more() -> None:
    """A gradient leaves at the end only, a loss at PAUSE."""
    end = "LAUNCH all_reduce sum tp (g_w) -> gradient\nWAIT gradient\nFREE g_w"
    schedule = first(edited(edited(FIRST, (end, "PAUSE\nADD gradient (w)")), ("ADD g_w", "ADD gradient")))
    assert found(0, schedule) == []
    loss = replace(schedule, signature=replace(schedule.signature, outputs=(Output("loss", "0", *LAYOUT),)))
    assert found(0, loss) == [f"{_place(loss, 0, 17)}: buffer gradient is added to after it was read"]


def test_in_a_schedule_that_is_not_executable_yet_buffers_may_stay() -> None:
    text = "RUN 0F0 (x) -> (h@0)\nRECV 1B0>0 pp=1 (k@0)\nWAIT 1B0>0\nRUN 0B0 (k@0) -> (gradient)"
    schedule = first(text)
    assert [each.what for each in check_buffers(0, schedule, MESH)] == [
        "there is no fragment 0F0",
        "nothing says how large buffer k@0 is",
        "there is no fragment 0B0",
        "buffers are never freed",
    ]
    unsized, without = "nothing says how large buffer k@0 is", "there is no fragment 0B0"
    found = check_buffers(0, schedule, MESH, {"0F0"}, is_executable=False)
    assert [(each.what, each.instructions) for each in found] == [(unsized, ((0, 1),)), (without, ((0, 3),))]


def test_where_no_buffer_has_a_size_none_needs_one() -> None:
    schedule = first("RUN 0F0 (x) -> (h@0)\nRECV 1B0>0 pp=1 (k@0)\nWAIT 1B0>0\nRUN 0B0 (k@0) -> (gradient)")
    grid = replace(schedule, buffers={name: each._replace(type=None) for name, each in schedule.buffers.items()})
    assert check_buffers(0, grid, MESH, {"0F0", "0B0"}, is_executable=False) == []


def test_violations_say_what_should_be_and_what_is() -> None:
    (violation,) = check_buffers(0, first(edited(FIRST, ("RUN f1 (d@1)", "RUN f1 (g_w)"))), MESH)
    assert violation.instructions == ((0, 13),)
    assert (violation.expected, violation.got, violation.fix) == ("reads after the last ADD", "read by instruction 12", "read it later")


def _place(schedule: Schedule, rank: int, number: int) -> str:
    if number == len(schedule.instructions):
        return f"rank {rank}, at the end"
    return f"rank {rank}, instruction {number}: {schedule.instructions[number]}"
