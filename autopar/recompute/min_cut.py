"""Which values of one layer are worth keeping, at a price of memory: a minimum cut, as a linear program.

    r[v] = 1 where v is computed again, k[v] = 1 where it is kept

    minimise   Σ seconds[v] r[v] + price Σ bytes[v] k[v]
    r[v] + k[v] ≥ 1       of each v that the backward reads
    r[u] + k[u] ≥ r[v]    of each u that v reads

Every vertex is integral: it is the cut between (v is there, v is computed again) of each v. Chen et al. (arXiv:1604.06174) and torch's
partitioner (torch/_functorch/partitioners.py) cut likewise; here seconds and bytes are weighed against each other, so that prices from low
to high give the whole curve between keeping all and keeping what a layer reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.partition.solver.integer_program import IntegerProgram

# Prices of a byte, from so many times below what it takes to compute a typical one again to so many times above.
_SPREAD, _NUM_PRICES = 1e3, 19
_TYPICAL = 1e4


@dataclass(frozen=True)
class KeptValue:
    """One value of a layer, in terms of the others by number. Infinite bytes: it cannot be kept; infinite seconds: not computed again."""

    seconds: float
    bytes: float
    reads: tuple[int, ...]
    is_wanted: bool


Cut = frozenset[int]


def cuts(values: Sequence[KeptValue]) -> tuple[Cut, ...]:
    """The values that are computed again at each of many prices of memory, from nothing to all that may be, each set once."""
    total_seconds = sum(each.seconds for each in values if each.seconds < math.inf)
    total_bytes = sum(each.bytes for each in values if each.bytes < math.inf)
    if not total_seconds or not total_bytes:
        return (frozenset(),)
    typical = total_seconds / total_bytes
    prices = typical * np.geomspace(1 / _SPREAD, _SPREAD, _NUM_PRICES)
    return tuple(dict.fromkeys([frozenset[int](), *(cut(values, float(price)) for price in prices)]))


def cut(values: Sequence[KeptValue], price: float) -> Cut:
    """What is computed again where a kept byte costs `price` seconds."""
    model = IntegerProgram(1.0, [0], 0)
    typical = sum(each.seconds for each in values if each.seconds < math.inf) or 1.0
    columns = add_layer(model, values, _TYPICAL / typical, lambda each: _TYPICAL / typical * price * each.bytes)
    solver = model.solver(0.0, 10.0)
    solver.run()
    found = np.asarray(solver.getSolution().col_value)
    return frozenset(number for number, (again, _) in enumerate(columns) if again is not None and found[again] > 0.5)


def add_layer(
    model: IntegerProgram, values: Sequence[KeptValue], scale: float, kept_cost: Callable[[KeptValue], float]
) -> list[tuple[int | None, int | None]]:
    """Columns r and k of each value, None where it cannot be that, and the rows between them; `kept_cost` gives the cost of k."""
    columns = [
        (
            model.column(scale * each.seconds) if each.seconds < math.inf else None,
            model.column(kept_cost(each)) if each.bytes < math.inf else None,
        )
        for each in values
    ]
    for each, (again, kept) in zip(values, columns, strict=True):
        if each.is_wanted:
            model.row(1.0, math.inf, [(column, 1.0) for column in (again, kept) if column is not None])
        if again is None:
            continue
        for read in each.reads:
            model.row(0.0, math.inf, [(again, -1.0), *((column, 1.0) for column in columns[read] if column is not None)])
    return columns
