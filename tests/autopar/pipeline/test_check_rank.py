"""What shows on one rank alone. The faults of whole programs are in test_check_pipeline.py."""

from __future__ import annotations

import pytest

from autopar.pipeline.actions import PipelineSchedule
from autopar.pipeline.check_rank import check_rank
from autopar.pipeline.expand import expand
from autopar.pipeline.program import parse_program
from autopar.pipeline.schedules import zb_v

ONE = PipelineSchedule("x", (0,), 1, ((),))


def whats(text: str, schedule: PipelineSchedule = ONE) -> list[str]:
    return [fault.what for fault in check_rank(parse_program("rank 0\n" + text, schedule), 0)]


@pytest.mark.parametrize("row", ["0F0\n0B0\n0REDUCE_GRAD", "0F0\n0I0\n0W0\n0REDUCE_GRAD"])
def test_a_backward_is_whole_or_halved(row: str) -> None:
    assert not whats(row)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("0F0\n0REDUCE_GRAD", "0B0 never runs"),
        ("0F0\n0I0\n0REDUCE_GRAD", "0W0 never runs"),
        ("0F0\n0W0\n0REDUCE_GRAD", "0I0 never runs"),
        ("0B0\n0REDUCE_GRAD", "0F0 never runs"),
        ("0F0\n0I0\n0B0\n0W0\n0REDUCE_GRAD", "0B0 does again what instruction 1: 0I0 did"),
        ("0F0\n0B0\n0W0\n0REDUCE_GRAD", "0W0 does again what instruction 1: 0B0 did"),
        ("0F0\n0B0", "the gradients of stage 0 are never reduced"),
        ("0F0\n0REDUCE_GRAD\n0B0", "gradients of stage 0 are reduced before they are complete"),
    ],
)
def test_names_what_is_wrong(row: str, what: str) -> None:
    assert what in whats(row)


def test_two_microbatches_both_run() -> None:
    two = PipelineSchedule("x", (0,), 2, ((),))
    assert whats("0F0\n0B0\n0REDUCE_GRAD", two) == ["0F1 never runs", "0B1 never runs"]


def test_a_rank_without_stages_has_nothing_to_do() -> None:
    assert not check_rank(parse_program("rank 0\n0F0\n0B0\n0REDUCE_GRAD\nrank 1", PipelineSchedule("x", (0,), 1, ((), ()))), 1)


def test_each_rank_of_a_good_program_is_fine() -> None:
    program = expand(zb_v(3, 4))
    assert not [fault for rank in range(3) for fault in check_rank(program, rank)]
