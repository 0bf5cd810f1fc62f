"""Where to cut a line into stages so that the slowest one is fastest: dynamic programming, exact, on arrays.

What a stage costs depends on the stage and its two ends alone, so

    best[s + 1][j] = min over i < j of max(best[s][i], cost(s, i, j))

is the least slowest of the first s + 1 stages, up to cut j. Equal answers are told apart by a second run that adds up
communication and squares over the stages that are no slower than the first run's answer. (One run cannot do both: a start that
is slower than another may be as good once a later stage is slower still.)

The n² pairs of cuts are far too many for long lines, and most of them are in no good placement. First a few hundred cuts are
tried, the cheapest ones in their neighbourhoods. Any placement with those is a placement, so the best is no faster than that.
Then, with all cuts: no stage may be slower than what was found, and compute time, as parameters and saved values, never falls
when a stage grows. So cut s can only lie so far from either end (`windows`), and pairs outside these windows are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.placement_tables import Floats, PlacementTables, Tile

Objective = Literal["seconds", "excess"]
# Cuts of the first try.
_FEW = 256
# Entries of a tile: few enough for a core's cache, enough to be worth a numpy call.
_ENTRIES = 1 << 17
_MIN_ROWS = 16
# What counts as equal: sums are exact, but not their quotients by a device's speed.
_EQUAL = 1e-9


class Limits(NamedTuple):
    """What a stage may take at most, and by how many bytes it may pass its capacity."""

    seconds: float = np.inf
    excess_bytes: float = 0.0


def best_starts(tables: PlacementTables) -> tuple[int, ...] | None:
    """The first unit of each stage of the best placement; None where none fits."""
    return _best(tables, "seconds")


def closest_starts(tables: PlacementTables) -> tuple[int, ...]:
    """Of the placement whose worst stage passes its capacity by the fewest bytes."""
    found = _best(tables, "excess")
    assert found is not None
    return found


def _best(tables: PlacementTables, objective: Objective) -> tuple[int, ...] | None:
    limits = Limits() if objective == "seconds" else Limits(excess_bytes=np.inf)
    few = _few_cuts(tables)
    if len(few) <= tables.last:
        limits = _no_worse(limits, objective, _Search(tables.at(few), limits).least(objective))
    found = _Search(tables, limits).least(objective)
    return _Search(tables, _no_worse(limits, objective, found)).starts() if np.isfinite(found) else None


def _no_worse(limits: Limits, objective: Objective, found: float) -> Limits:
    """With what was found as a limit, and what equals it."""
    worst = found * (1 + _EQUAL)
    return limits._replace(seconds=worst) if objective == "seconds" else limits._replace(excess_bytes=worst)


def _few_cuts(tables: PlacementTables) -> NDArray[np.int64]:
    """Numbers of cuts, the first and the last among them: of as many stretches of equal work, half compute and half length, the
    cut with the least to send. All cuts where they are few."""
    if tables.last <= 2 * max(_FEW, tables.num_stages):
        return np.arange(tables.last + 1)
    shares = np.arange(tables.last + 1) / tables.last
    total = float(tables.compute_seconds[-1])
    shares += tables.compute_seconds / total if total else shares
    stretch = np.minimum(shares / 2 * max(_FEW, 2 * tables.num_stages), max(_FEW, 2 * tables.num_stages) - 1).astype(np.int64)
    order = np.lexsort((tables.crossing_seconds(), stretch))
    first = np.unique(stretch[order], return_index=True)[1]
    return np.unique(np.concatenate([[0], order[first], [tables.last]]))


def windows(tables: PlacementTables, limits: Limits) -> list[range]:
    """Where each stage may begin, and as the last the only end: no placement within `limits` has a cut outside.

    Found by giving each stage all it can take by what never falls when it grows, from the left and, for what must be left to
    later stages, from the right.
    """
    num_stages, last = tables.num_stages, tables.last
    highest, lowest = [0], [last]
    for stage in range(num_stages):
        highest.append(_furthest(tables, limits, stage, highest[-1]))
    for stage in reversed(range(num_stages)):
        lowest.append(_nearest(tables, limits, stage, lowest[-1]))
    found: list[range] = []
    for number, (low, high) in enumerate(zip(reversed(lowest), highest, strict=True)):
        # Every stage has a unit of its own.
        found.append(range(max(low, number), min(high, last - num_stages + number) + 1))
    return [range(1) if 0 in found[0] else range(0), *found[1:-1], range(last, last + 1) if last in found[-1] else range(0)]


def _prefixes(tables: PlacementTables, limits: Limits, stage: int) -> Iterator[tuple[Floats, float]]:
    """Prefix sums of what never falls when the stage grows, and how much of it the stage may have."""
    yield tables.compute_seconds, limits.seconds * float(tables.speeds[stage])
    held = tables.held_bytes + tables.live_microbatches[stage] * tables.saved_bytes
    yield held, float(tables.capacity_bytes[stage]) + limits.excess_bytes


def _furthest(tables: PlacementTables, limits: Limits, stage: int, begin: int) -> int:
    ends = [np.searchsorted(prefix, prefix[begin] + room, "right") - 1 for prefix, room in _prefixes(tables, limits, stage)]
    return max(begin, int(min(ends)))


def _nearest(tables: PlacementTables, limits: Limits, stage: int, end: int) -> int:
    begins = [np.searchsorted(prefix, prefix[end] - room, "left") for prefix, room in _prefixes(tables, limits, stage)]
    return min(end, int(max(begins)))


@dataclass(frozen=True)
class _Step:
    """Candidates: `stage` from every one of `begins` to every one of `ends`. What is past the limits takes infinitely long."""

    stage: int
    begins: slice
    ends: slice
    seconds: Floats
    excess_bytes: Floats | None
    communication_seconds: Floats


@dataclass(frozen=True)
class _Search:
    tables: PlacementTables
    limits: Limits

    def least(self, objective: Objective) -> float:
        """The slowest stage of the best placement, or how many bytes its worst one lacks; infinite where none is within the limits."""
        best = np.full((self.tables.num_stages + 1, self.tables.last + 1), np.inf)
        best[0, 0] = -np.inf
        for step in self.steps():
            cost = step.seconds
            if objective == "excess":
                assert step.excess_bytes is not None
                cost = np.where(np.isfinite(cost), step.excess_bytes, np.inf)
            slowest = np.maximum(best[step.stage, step.begins, None], cost).min(axis=0)
            after = best[step.stage + 1, step.ends]
            np.minimum(after, slowest, out=after)
        return float(best[-1, -1])

    def starts(self) -> tuple[int, ...] | None:
        """Of the placements within the limits the one with the least communication, and of these with the least sum of squares."""
        shape = (self.tables.num_stages + 1, self.tables.last + 1)
        sent, squares, came_from = np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
        sent[0, 0] = squares[0, 0] = 0.0
        for step in self.steps():
            before, after = (step.stage, step.begins), (step.stage + 1, step.ends)
            total = sent[before][:, None] + np.where(np.isfinite(step.seconds), step.communication_seconds, np.inf)
            least = total.min(axis=0)
            summed = np.where(total == least, squares[before][:, None] + step.seconds**2, np.inf)
            begin = summed.argmin(axis=0)
            summed = summed[begin, np.arange(len(begin))]
            is_better = (least < sent[after]) | ((least == sent[after]) & (summed < squares[after]))
            sent[after] = np.where(is_better, least, sent[after])
            squares[after] = np.where(is_better, summed, squares[after])
            came_from[after] = np.where(is_better, begin + step.begins.start, came_from[after])
        return self._traced(came_from) if np.isfinite(sent[-1, -1]) else None

    def _traced(self, came_from: NDArray[np.int64]) -> tuple[int, ...]:
        cut, found = self.tables.last, list[int]()
        for stage in range(self.tables.num_stages, 0, -1):
            cut = int(came_from[stage, cut])
            found.append(int(self.tables.cuts[cut]))
        return tuple(reversed(found))

    def steps(self) -> Iterator[_Step]:
        """All stages within the windows, in an order in which what leads to a cut comes before what goes on from there."""
        places = windows(self.tables, self.limits)
        if not all(places):
            return
        begin = 0
        while begin < self.tables.last:
            stages = [stage for stage, place in enumerate(places[:-1]) if place.start < begin + 1 <= place.stop]
            if not stages:
                begin = min((place.start for place in places[:-1] if place.start > begin), default=self.tables.last)
                continue
            ends = range(max(places[stages[0] + 1].start, begin + 1), places[stages[-1] + 1].stop)
            begins = range(begin, min(begin + max(_ENTRIES // len(ends), _MIN_ROWS), self.tables.last))
            yield from self._of_tile(begins, ends, places)
            begin = begins.stop

    def _of_tile(self, begins: range, ends: range, places: list[range]) -> Iterator[_Step]:
        stages = [stage for stage, place in enumerate(places[:-1]) if place.start < begins.stop and begins.start < place.stop]
        ends = range(ends.start, max(ends.stop, places[stages[-1] + 1].stop))
        tile = self.tables.tile(begins, ends)
        for stage in stages:
            here, there = _overlap(begins, places[stage]), _overlap(ends, places[stage + 1])
            if here and there:
                yield self._step(stage, tile, begins, ends, here, there)

    def _step(self, stage: int, tile: Tile, begins: range, ends: range, here: range, there: range) -> _Step:
        part = (slice(here.start - begins.start, here.stop - begins.start), slice(there.start - ends.start, there.stop - ends.start))
        tables, excess = self.tables, None
        communication = tile.communication_seconds[part]
        seconds = tile.compute_seconds[part] / tables.speeds[stage] + communication
        is_over = seconds > self.limits.seconds
        if tile.fixed_bytes is not None and tile.live_bytes is not None:
            excess = tile.fixed_bytes[part] + tables.live_microbatches[stage] * tile.live_bytes[part] - tables.capacity_bytes[stage]
            is_over |= excess > self.limits.excess_bytes
        seconds[is_over] = np.inf
        return _Step(stage, slice(here.start, here.stop), slice(there.start, there.stop), seconds, excess, communication)


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
