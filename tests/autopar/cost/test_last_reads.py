"""The memory of a parameter is read by its name, by a view of it, and by what is under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost.last_reads import last_reads, reads
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Schedule
from tests.autopar.cost.test_schedule_memory import LAYOUT, schedule_of


def of_parameter(text: str) -> Schedule:
    return replace(schedule_of(text), signature=Signature((Input("parameter", "w", *LAYOUT),), ()))


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("RUN copy (x) -> (y)\nRUN copy (y) -> (z)", 0),
        ("RUN view (x) -> (y)\nRUN copy (y) -> (z)", 1),
        ("RUN view (x) -> (y)\nRUN view (y) -> (z)\nRUN copy (z) -> (total)\nFREE total", 2),
        ("RUN copy (x) -> (y)\nLAUNCH all_gather copy dp (x) -> z\nRUN copy (y) -> (total)\nWAIT z", 3),
        ("SEND t pp=1 (x)\nRUN copy (x) -> (y)\nWAIT t", 2),
        ("UPDATE (x) by (x)", -1),
        ("RUN unknown (x) -> (y)\nFREE y", 0),
    ],
)
def test_the_last_instruction_that_uses_the_memory_of_a_parameter(text: str, last: int) -> None:
    assert last_reads(of_parameter(text)) == {"x": last}


def test_what_is_no_parameter_is_not_asked_for() -> None:
    assert list(reads(schedule_of("RUN copy (x) -> (y)"))) == [] and last_reads(schedule_of("RUN copy (x) -> (y)")) == {}
