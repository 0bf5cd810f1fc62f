"""Where the cheapest of the known answers is dearest, by the price of a byte."""

from __future__ import annotations

import math

import pytest

from autopar.partition.solver.incumbents import Incumbent, Incumbents


def answers(*known: tuple[float, float]) -> Incumbents:
    """(seconds, bytes too many)."""
    found = Incumbents()
    for number, (seconds, excess_bytes) in enumerate(known):
        found.add(Incumbent((number,), seconds, excess_bytes, excess_bytes <= 0))
    return found


def test_the_best_price_is_where_one_that_fits_meets_one_that_does_not() -> None:
    found = answers((10.0, 8.0), (12.0, 2.0), (20.0, -4.0), (30.0, -5.0))
    # 12 + 2 p = 20 - 4 p at p = 4/3; there the first costs 20.7, and the last 23.3.
    assert found.best_price() == pytest.approx(4 / 3)
    assert found.cheapest(4 / 3) == pytest.approx(12 + 8 / 3)
    assert found.cheapest(0.0) == 10.0
    assert [answer.picks for answer in found.ends(4 / 3) or ()] == [(2,), (1,)]


@pytest.mark.parametrize("price", [0.1 * step for step in range(40)])
def test_no_other_price_is_better(price: float) -> None:
    found = answers((10.0, 8.0), (12.0, 2.0), (11.0, 6.0), (20.0, -4.0), (19.0, -1.0), (30.0, -5.0))
    assert found.cheapest(price) <= found.cheapest(found.best_price()) + 1e-12


def test_bytes_have_no_price_where_the_fastest_fits() -> None:
    assert answers((10.0, -1.0), (12.0, -3.0)).best_price() == 0.0
    assert answers((10.0, -1.0)).ends(0.0) is None


def test_what_is_impossible_or_fits_but_for_its_working_bytes_is_no_answer() -> None:
    found = answers((math.inf, -1.0))
    found.add(Incumbent((0,), 1.0, -2.0, fits=False))
    assert found.known == []
    assert not found.has_fitting
