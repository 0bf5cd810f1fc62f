"""Where in the grid an instruction stands."""

from __future__ import annotations

import pytest

from autopar.checks.violation import Violation
from autopar.ir.actions import GridCell
from autopar.pipeline.expand import expand
from autopar.pipeline.marks import executed_order, grid_place, marked_grid
from autopar.pipeline.schedules import one_forward_one_backward
from tests.support.faults.pipelines import edited

PROGRAM = expand(one_forward_one_backward(2, 2))


def position(rank: int, text: str) -> int:
    return next(at for at, each in enumerate(PROGRAM.places[rank].instructions) if str(each).startswith(text))


@pytest.mark.parametrize(
    ("rank", "text", "expected"),
    [
        (0, "RUN 0F1", GridCell(0, 1)),
        (0, "SEND 0F1>1", GridCell(0, 1)),  # Its maker.
        (0, "RECV 1B1>0", GridCell(0, 3)),  # Its reader.
        (0, "WAIT 1B0>0", GridCell(0, 2)),  # What it holds up.
        (1, "RUN 1REDUCE_GRAD", GridCell(1, 3)),  # What it follows.
        (1, "WAIT 1B1>0", GridCell(1, 4)),  # After the last.
    ],
)
def test_each_instruction_belongs_to_an_action(rank: int, text: str, expected: GridCell) -> None:
    assert grid_place(PROGRAM, rank, position(rank, text)) == expected


def test_the_grid_shows_what_the_ranks_run() -> None:
    assert executed_order(PROGRAM) == PROGRAM.order
    without = edited(PROGRAM, 1, "drop RUN 1F1")
    assert [str(action) for action in executed_order(without).orders[1]] == ["1F0", "1B0", "1B1"]


def test_a_violation_is_marked_at_all_its_instructions() -> None:
    found = [
        Violation("something is off", instructions=((0, position(0, "SEND 0F0>1")), (1, position(1, "RECV 0F0>1")))),
        Violation("so is this", instructions=((1, position(1, "RUN 1F0")),)),
        Violation("and this everywhere"),
    ]
    assert marked_grid(PROGRAM, found).splitlines()[1:] == [
        "rank 0 | 0F0 0F1 .   .   0B0 -   .   0B1 -",
        "         ^^^  <-- ERROR 1",
        "rank 1 | .   1F0 1B0 -   1F1 1B1 -",
        "             ^^^  <-- ERROR 1, 2",
    ]
