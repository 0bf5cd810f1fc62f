"""What may be computed again of one segment: the sets of which none is better than another in time, in what is kept and in what is needed.

Where the backward reads few values that is every set of them. Else the search goes from the minimum cuts, at many prices of memory, over
sets that differ in one value from the best so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.recompute.min_cut import cuts
from autopar.recompute.timeline import Again, Timeline
from autopar.recompute.walk import LayerMemory

Option = tuple[Again, LayerMemory]

# How many sets of a segment are priced.
_MOST_PRICED = 2000
# Prices of a byte that is kept and of one that is needed, from so many times below what computing a typical one again takes to so many
# times above: where there are too many options, the best at these remain.
_SPREAD, _NUM_PRICES = 1e2, 9


def options_of(timeline: Timeline, most: int) -> list[Option]:
    """At most so many; the first computes nothing again."""
    nothing: Again = frozenset()
    found = {nothing: timeline.memory(nothing)}
    decisions = timeline.decisions
    if 2 ** len(decisions) <= _MOST_PRICED:
        sizes = range(1, len(decisions) + 1)
        _price(timeline, found, (each for size in sizes for each in itertools.combinations(decisions, size)))
    else:
        _price(timeline, found, _seeds(timeline))
        _search(timeline, found)
    best = _best(list(found.items()))
    if len(best) > most:
        best = _spread(best, most)
    return [(nothing, found[nothing]), *(each for each in best if each[0])]


def _price(timeline: Timeline, found: dict[Again, LayerMemory], sets: Iterable[Sequence[Again]]) -> None:
    for each in sets:
        again = timeline.closed(itertools.chain.from_iterable(each))
        if again is not None and again not in found:
            found[again] = timeline.memory(again)


def _seeds(timeline: Timeline) -> list[Sequence[Again]]:
    """The cuts, by the decisions that they touch, and all that may be."""
    seeds = [[each for each in timeline.decisions if each & cut] for cut in cuts(timeline.values)]
    return [*seeds, timeline.decisions]


def _search(timeline: Timeline, found: dict[Again, LayerMemory]) -> None:
    """Price the neighbours of the best, until there are none or enough is priced."""
    seen = set[Again]()
    while len(found) < _MOST_PRICED:
        around = [again for again, _ in _best(list(found.items())) if again not in seen][: _MOST_PRICED // 20]
        if not around:
            return
        for again in around:
            seen.add(again)
            chosen = [each for each in timeline.decisions if each & again]
            others = [each for each in timeline.decisions if not each & again]
            _price(timeline, found, [[each for each in chosen if each is not gone] for gone in chosen])
            _price(timeline, found, [[*chosen, more] for more in others])


def _best(options: Sequence[Option]) -> list[Option]:
    """Those that no other is at least as good as in all, in order of their seconds."""
    ordered = sorted(options, key=lambda option: (option[1].seconds, option[1].kept_bytes, option[1].own_bytes, sorted(option[0])))
    found, sizes = list[Option](), np.empty((len(ordered), 2))
    for option in ordered:
        kept, own = option[1].kept_bytes, option[1].own_bytes
        if not np.any((sizes[: len(found), 0] <= kept) & (sizes[: len(found), 1] <= own)):
            sizes[len(found)] = kept, own
            found.append(option)
    return found


def _spread(options: Sequence[Option], most: int) -> list[Option]:
    """What is best at some prices, and what keeps, needs, or takes least; then whatever comes first."""
    table = np.array([[each.seconds, each.kept_bytes, each.own_bytes] for _, each in options])
    typical = max(table[:, 0].max(), 1e-12) / max(table[:, 1].max(), 1.0)
    prices = [0.0, *(typical * np.geomspace(1 / _SPREAD, _SPREAD, _NUM_PRICES))]
    weights = np.array([[1.0, kept, own] for kept in prices for own in prices])
    chosen = dict.fromkeys(int(np.argmin(table @ weight)) for weight in weights)
    chosen = dict.fromkeys([0, int(np.argmin(table[:, 1])), int(np.argmin(table[:, 2])), int(np.argmin(table[:, 1:].max(axis=1))), *chosen])
    return [options[number] for number in sorted(list(chosen)[:most])]
