"""What must come before what, on schedules that show one reason each."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.ir.dependencies import dependencies
from autopar.ir.instructions import parse


def before(text: str) -> list[set[int]]:
    return dependencies(parse(text))


def test_what_reads_follows_what_writes_and_a_collective_writes_at_its_wait() -> None:
    text = """
    RUN f (x) -> (a)
    LAUNCH all_reduce sum dp (a) -> b
    RUN g (a) -> (c)
    WAIT b
    RUN h (b, c) -> (d)
    """
    assert before(text) == [set(), {0}, {0}, {1}, {2, 3}]


def test_sums_are_added_up_in_one_order_and_read_when_they_are_complete() -> None:
    text = "RUN f (x) -> (a)\nADD s (a)\nRUN f (y) -> (b)\nADD s (b)\nRUN g (s) -> (c)"
    assert before(text) == [set(), {0}, set(), {1, 2}, {1, 3}]


def test_transfers_of_one_channel_keep_their_order() -> None:
    text = "SEND p pp=1 (x)\nSEND q pp=1 (y)\nSEND r pp=2 (y)\nRECV s pp=1 (z)\nWAIT s\nRUN f (z) -> (a)"
    assert before(text) == [set(), {0}, set(), set(), {3}, {4}]


def test_nothing_passes_pause() -> None:
    assert before("RUN f (x) -> (a)\nRUN f (y) -> (b)\nPAUSE\nRUN g (z) -> (c)") == [set(), set(), {0, 1}, {2}]


@pytest.mark.parametrize("last", ["FREE a", "UPDATE (w) by (a)"])
def test_what_follows_from_the_order_is_refused(last: str) -> None:
    with pytest.raises(ScheduleError, match="only what has no FREE and no UPDATE yet"):
        before(f"RUN f (x) -> (a)\n{last}")
