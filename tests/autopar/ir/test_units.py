"""Numbers with units, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.units import BYTES, BYTES_PER_SECOND, FLOPS, PLAIN, SECONDS, format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("3.35 TB/s", BYTES_PER_SECOND, 3.35e12),
        ("400 Gb/s", BYTES_PER_SECOND, 50e9),
        ("400Gbps", BYTES_PER_SECOND, 50e9),
        ("1 GiB/s", BYTES_PER_SECOND, 2.0**30),
        ("80 GB", BYTES, 80e9),
        ("80GiB", BYTES, 80 * 2.0**30),
        ("2.7 us", SECONDS, 2.7e-6),
        ("2.7 µs", SECONDS, 2.7e-6),
        ("0", SECONDS, 0.0),
        ("989 TFLOP/s", FLOPS, 989e12),
        ("1.2 PFLOPS", FLOPS, 1.2e15),
        ("3.35e12", BYTES_PER_SECOND, 3.35e12),
        ("1_000", BYTES, 1000.0),
        ("1.5", PLAIN, 1.5),
    ],
)
def test_people_write_units_in_many_ways(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == value


@pytest.mark.parametrize(
    ("text", "unit", "problem"),
    [
        ("fast", SECONDS, "is 'fast', no number; write '2.7 us' or its value in s"),
        ("nan", BYTES, "is 'nan', no number; write '80 GB' or its value in B"),
        ("80 GB", BYTES_PER_SECOND, "is '80 GB', where 'GB' is not a unit for B/s; write '3.35 TB/s' or a plain number in B/s"),
        ("2 MS", SECONDS, "is '2 MS', where 'MS' is not a unit for s; write '2.7 us' or a plain number in s"),
        ("2 x", PLAIN, "is '2 x', where 'x' is not wanted; write a plain number"),
    ],
)
def test_what_is_no_quantity_is_refused_with_an_example(text: str, unit: str, problem: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_quantity(text, unit)
    assert str(raised.value) == problem


@given(st.floats(1e-15, 1e21), st.sampled_from([BYTES, BYTES_PER_SECOND, FLOPS, SECONDS]))
def test_what_is_written_is_read_back_exactly(value: float, unit: str) -> None:
    assert parse_quantity(format_quantity(value, unit), unit) == value


def test_digits_round_for_people() -> None:
    assert format_quantity(1.2345e12, BYTES_PER_SECOND, 3) == "1.23 TB/s"
    assert format_quantity(999.9e9, BYTES, 3) == "1 TB"
    assert format_quantity(0.0, SECONDS, 3) == "0 s"
