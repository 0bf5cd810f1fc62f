"""What a rank must do whatever becomes of its buffers. The faults of whole programs are in test_check.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.actions import PipelineSchedule, parse_schedule
from autopar.ir.mesh import Mesh
from autopar.pipeline.check_actions import check_actions
from autopar.pipeline.expand import expand
from autopar.pipeline.marks import marked_grid
from autopar.pipeline.schedules import one_forward_one_backward, zb_v
from tests.support.faults.pipelines import edited


def whats(row: str, num_microbatches: int = 1) -> list[str]:
    """Of one rank that runs the actions of `row`; with `-` it never reduces."""
    order = parse_schedule(f"pipeline x: {num_microbatches} microbatches, stages on ranks 0\nrank 0 | {row.replace('-', '')}")
    program = expand(order)
    if "-" in row:
        program = edited(program, 0, "drop RUN 0REDUCE_GRAD")
    return [violation.what for violation in check_actions(program)]


@pytest.mark.parametrize("row", ["0F0 0B0", "0F0 0I0 0W0"])
def test_a_backward_is_whole_or_halved(row: str) -> None:
    assert not whats(row)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("0F0", "0B0 never runs"),
        ("0F0 0I0", "0W0 never runs"),
        ("0F0 0W0", "0I0 never runs"),
        ("0B0", "0F0 never runs"),
        ("0F0 0I0 0B0 0W0", "0B0 does again what instruction 1: RUN 0I0 (0F0.I, 0F0.W) -> () did"),
        ("0F0 0B0 0W0", "0W0 does again what instruction 1: RUN 0B0 (0F0.I, 0F0.W) -> () did"),
        ("0F0 0B0 -", "the gradients of stage 0 are never reduced"),
    ],
)
def test_names_what_is_wrong(row: str, what: str) -> None:
    assert what in whats(row)


def test_a_reduction_before_the_last_backward_is_named() -> None:
    program = edited(expand(one_forward_one_backward(1, 2)), 0, "move RUN 0REDUCE_GRAD before RUN 0B1")
    (violation,) = check_actions(program)
    assert violation.what == "gradients of stage 0 are reduced before they are complete" and violation.got == "0B1 after it"


def test_two_microbatches_both_run() -> None:
    assert whats("0F0 0B0", 2) == ["0F1 never runs", "0B1 never runs"]


def test_a_rank_without_stages_has_nothing_to_do() -> None:
    order = PipelineSchedule("x", (0,), 1, (one_forward_one_backward(1, 1).orders[0], ()))
    assert not check_actions(expand(order))


def test_each_rank_of_a_good_program_is_fine() -> None:
    assert not check_actions(expand(zb_v(3, 4)))


def test_an_action_that_reads_or_sends_other_buffers_is_named() -> None:
    """What the instructions say is what is proved further, so it must be what the stages do."""
    program = expand(one_forward_one_backward(2, 1))
    changes = {"RUN 0F0": {"outputs": ("0F0>1",)}, "SEND 0F0>1": {"buffers": ("0F0.W",)}}
    row = [replace(each, **changes.get(" ".join(str(each).split(" ")[:2]), {})) for each in program.places[0].instructions]
    schedule = replace(program.places[0], instructions=tuple(row))
    found = check_actions(replace(program, places=(schedule, program.places[1])))
    assert [each.what for each in found] == [
        "0F0 reads or makes something else than its stage does",
        "0F0>1 carries something else than its value",
    ]
    assert found[0].expected == "RUN 0F0 () -> (0F0>1, 0F0.I, 0F0.W)" and found[1].got == "(0F0.W)"


def test_of_several_ranks_at_a_place_the_first_is_named() -> None:
    program = edited(expand(one_forward_one_backward(2, 2)), 1, "drop RUN 1B1")
    program = replace(program, mesh=Mesh((("pp", 2), ("dp", 2))))
    violation = next(each for each in check_actions(program) if each.what == "1B1 never runs")
    assert violation.where == "rank 2, at the end" and violation.instructions == ((2, len(program.places[1].instructions)),)
    assert "ERROR 1" in marked_grid(program, [violation]).splitlines()[-1], "below the row of the second place"


def test_a_stage_is_told_by_its_place_and_the_fault_by_its_rank() -> None:
    program = edited(expand(one_forward_one_backward(2, 2)), 1, "add SEND 0F1>1 pp=1 before RUN 1B1")
    program = replace(program, mesh=Mesh((("pp", 2), ("dp", 2))))
    violation = next(each for each in check_actions(program) if "SEND 0F1>1" in each.where)
    assert violation.where.startswith("rank 2, instruction ")
    assert (violation.what, violation.expected, violation.got) == ("stage 0 is not at pp = 1", "pp = 0", "pp = 1")
    assert "rank" not in "".join((violation.what, violation.expected, violation.got, violation.fix))


def test_a_printed_program_names_places() -> None:
    assert [line for line in str(expand(one_forward_one_backward(2, 1))).splitlines() if not line.startswith(" ")] == ["pp = 0", "pp = 1"]
