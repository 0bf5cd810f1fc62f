"""The cut against every set of values of small random graphs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from autopar.recompute.min_cut import KeptValue, cut, cuts


def price_of(values: Sequence[KeptValue], again: frozenset[int], price: float) -> float:
    """Seconds and bytes of computing `again` once more; infinite where it cannot be."""
    wanted = {number for number, each in enumerate(values) if each.is_wanted}
    read = {each for number in again for each in values[number].reads}
    kept = (wanted | read) - again
    return sum(values[number].seconds for number in again) + price * sum(values[number].bytes for number in kept)


def random_values(seed: int) -> list[KeptValue]:
    draw = random.Random(seed)
    found = [KeptValue(math.inf, draw.choice([0.0, 5.0]), (), False)]
    for number in range(1, 8):
        reads = tuple(draw.sample(range(number), min(number, draw.choice([1, 1, 2]))))
        size = math.inf if draw.random() < 0.15 else draw.uniform(1, 10)
        found.append(
            KeptValue(
                draw.choice([math.inf, draw.uniform(1, 10)]) if size < math.inf else draw.uniform(1, 5), size, reads, draw.random() < 0.5
            )
        )
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_set_costs_less(seed: int) -> None:
    values = random_values(seed)
    sets = [frozenset(each) for size in range(8) for each in itertools.combinations(range(8), size)]
    for price in (0.1, 1.0, 10.0):
        best = min(price_of(values, each, price) for each in sets if all(values[n].seconds < math.inf for n in each))
        if best < math.inf:
            assert price_of(values, cut(values, price), price) == pytest.approx(best)


def test_the_curve_goes_from_keeping_all_to_what_a_layer_reads() -> None:
    """x → a → b → c, all wanted, c dear to compute and small."""
    values = [
        KeptValue(math.inf, 0.0, (), False),
        KeptValue(1.0, 10.0, (0,), True),
        KeptValue(1.0, 10.0, (1,), True),
        KeptValue(50.0, 1.0, (2,), True),
    ]
    found = cuts(values)
    assert found[0] == frozenset() and frozenset({1, 2}) in found and found[-1] == frozenset({1, 2, 3})
