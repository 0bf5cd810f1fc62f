"""How a fault names its place, in words and in the grid."""

from __future__ import annotations

import pytest

from autopar.pipeline.actions import Place
from autopar.pipeline.expand import expand
from autopar.pipeline.fault import describe, fault_at, place
from autopar.pipeline.schedules import one_forward_one_backward

PROGRAM = expand(one_forward_one_backward(2, 2))


def position(rank: int, text: str) -> int:
    return [str(each) for each in PROGRAM.ranks[rank]].index(text)


@pytest.mark.parametrize(
    ("rank", "text", "expected"),
    [
        (0, "0F1", Place(0, 1)),
        (0, "0SEND_F1>1@1", Place(0, 1)),  # Its maker.
        (0, "0RECV_B1<1@1", Place(0, 3)),  # Its reader.
        (0, "WAIT 0RECV_B0<1@1", Place(0, 2)),  # What it holds up.
        (1, "1REDUCE_GRAD", Place(1, 3)),  # What it follows.
        (1, "WAIT 1SEND_B1>0@0", Place(1, 4)),  # After the last.
    ],
)
def test_each_instruction_belongs_to_an_action(rank: int, text: str, expected: Place) -> None:
    assert place(PROGRAM, rank, position(rank, text)) == expected


def test_words() -> None:
    at = position(0, "WAIT 0RECV_B1<1@1")
    assert describe(PROGRAM, 0, at) == f"rank 0, instruction {at}: WAIT 0RECV_B1<1@1 (microbatch 1)"
    assert describe(PROGRAM, 0, position(0, "0REDUCE_GRAD")).endswith(": 0REDUCE_GRAD")
    assert describe(PROGRAM, 1, 999) == "rank 1, at the end"


def test_a_fault_reads_like_any_violation() -> None:
    fault = fault_at(PROGRAM, 0, 0, "something is off", "this", "that", "do so")
    assert str(fault) == (
        "rank 0, instruction 0: 0F0 (microbatch 0): something is off\n    expected: this\n    got:      that\n    fix:      do so"
    )
    assert fault.places == (Place(0, 0),)
