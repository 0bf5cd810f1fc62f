"""Seconds and bytes of every stage [i, j) of a line, as arrays.

Everything a stage costs is a difference of prefix sums, a maximum, or a sum over *boxes*: "counts for stages that begin in
[i0, i1) and end in [j0, j1)". A value made by unit p and read by units r and t, for example, is

    sent      by stages that begin at p or before and end in (p, t]
    received  by stages that begin in (p, r] and end after r, and by those that begin in (r, t] and end after t

A sum of boxes is the cumulative sum, along both axes, of what their corners add and take away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.placement_problem import Devices, Line

Floats = NDArray[np.float64]
# How many bits of a total are kept. Sums of what has no more are exact in float64, in any order: equal stages compare equal.
_BITS = 48


class Box(NamedTuple):
    """`weight` counts for stages [i, j) with first_begin <= i < end_begin and first_end <= j < end_end."""

    first_begin: int
    end_begin: int
    first_end: int
    end_end: int
    weight: float


@dataclass(frozen=True)
class Boxes:
    """Columns of `corners`: first_begin, end_begin, first_end, end_end."""

    corners: NDArray[np.int64]
    weights: Floats

    @staticmethod
    def of(boxes: Iterable[Box]) -> Boxes:
        found = [box for box in boxes if box.weight]
        corners = np.array([box[:4] for box in found], dtype=np.int64).reshape(-1, 4)
        return Boxes(corners, on_grid(np.array([box.weight for box in found])))

    def at(self, cuts: NDArray[np.int64]) -> Boxes:
        """The same with stages that begin and end at `cuts` alone, named by their numbers."""
        corners = np.searchsorted(cuts, self.corners)
        kept = (corners[:, 0] < corners[:, 1]) & (corners[:, 2] < corners[:, 3])
        return Boxes(corners[kept], self.weights[kept])

    def tile(self, begins: range, ends: range) -> Floats:
        """The sums for stages that begin in `begins` and end in `ends`: one row a begin, one column an end."""
        first_begin, end_begin = np.clip(self.corners[:, :2], begins.start, begins.stop).T - begins.start
        first_end, end_end = np.clip(self.corners[:, 2:], ends.start, ends.stop).T - ends.start
        kept = (first_begin < end_begin) & (first_end < end_end)
        top, bottom, left, right, weights = (each[kept] for each in (first_begin, end_begin, first_end, end_end, self.weights))
        height, width = len(begins) + 1, len(ends) + 1
        where = np.concatenate([top * width + left, bottom * width + right, top * width + right, bottom * width + left])
        what = np.concatenate([weights, weights, -weights, -weights])
        # Of no boxes at all numpy makes integers.
        sums = np.bincount(where, what, height * width).astype(np.float64, copy=False).reshape(height, width)
        return sums.cumsum(0).cumsum(1)[:-1, :-1]


class Tile(NamedTuple):
    """Stages that begin in some range and end in another. Where they would end before they begin communication is infinite."""

    compute_seconds: Floats
    communication_seconds: Floats
    # What a stage holds whatever the number of live microbatches, and what per live microbatch; None where no stage has a cap.
    fixed_bytes: Floats | None
    live_bytes: Floats | None


@dataclass(frozen=True)
class PlacementTables:
    """Prefix sums, one longer than the units, and boxes. All stages begin and end at `cuts`, of which ranges give the numbers."""

    cuts: NDArray[np.int64]
    compute_seconds: Floats
    held_bytes: Floats
    saved_bytes: Floats
    working_bytes: Floats
    communication: Boxes
    shared: Boxes
    received: Boxes
    speeds: Floats
    capacity_bytes: Floats
    live_microbatches: Floats

    @staticmethod
    def of(line: Line, devices: Devices, live_microbatches: Sequence[int]) -> PlacementTables:
        """With a cut before every unit and behind the last."""
        units, num_units = line.units, len(line.units)
        sends = [Box(0, v.producer + 1, v.producer + 1, max(v.readers) + 1, devices.transfer_seconds(v)) for v in line.values]
        receipts = [list(_touches(v.producer, v.readers, num_units)) for v in line.values]
        paid = [Box(*each, devices.transfer_seconds(v)) for v, touches in zip(line.values, receipts, strict=True) for each in touches]
        held = [Box(*each, v.bytes) for v, touches in zip(line.values, receipts, strict=True) for each in touches]
        return PlacementTables(
            np.arange(num_units + 1),
            _prefix([unit.forward_seconds + unit.backward_seconds for unit in units]),
            _prefix([unit.held_bytes for unit in units]),
            _prefix([unit.saved_bytes for unit in units]),
            np.array([unit.working_bytes for unit in units]),
            Boxes.of([*sends, *paid]),
            Boxes.of(Box(*each, shared.bytes) for shared in line.shared for each in _touches(-1, shared.units, num_units)),
            Boxes.of(held),
            np.array(devices.speeds),
            np.array(devices.capacity_bytes, dtype=np.float64),
            np.array(live_microbatches, dtype=np.float64),
        )

    def at(self, cuts: NDArray[np.int64]) -> PlacementTables:
        """The same line, to be cut at `cuts` alone; the first is before the first unit, the last behind the last."""
        working = np.maximum.reduceat(self.working_bytes, cuts[:-1])
        sums = (self.compute_seconds[cuts], self.held_bytes[cuts], self.saved_bytes[cuts], working)
        boxes = (self.communication.at(cuts), self.shared.at(cuts), self.received.at(cuts))
        return PlacementTables(self.cuts[cuts], *sums, *boxes, self.speeds, self.capacity_bytes, self.live_microbatches)

    @property
    def num_stages(self) -> int:
        return len(self.speeds)

    @property
    def last(self) -> int:
        """The number of the last cut."""
        return len(self.cuts) - 1

    def tile(self, begins: range, ends: range) -> Tile:
        here, there = slice(begins.start, begins.stop), slice(ends.start, ends.stop)
        communication = self.communication.tile(begins, ends)
        if ends.start < begins.stop:
            communication[np.arange(ends.start, ends.stop) <= np.arange(begins.start, begins.stop)[:, None]] = np.inf
        fixed = live = None
        if np.isfinite(self.capacity_bytes).any():
            fixed = _between(self.held_bytes, here, there) + self.shared.tile(begins, ends) + self._working_bytes(begins, ends)
            live = _between(self.saved_bytes, here, there) + self.received.tile(begins, ends)
        return Tile(_between(self.compute_seconds, here, there), communication, fixed, live)

    def _working_bytes(self, begins: range, ends: range) -> Floats:
        """The largest of the units of each stage; 0 for stages that end before they begin."""
        last_unit = np.arange(ends.start, ends.stop) - 1
        largest = np.where(last_unit >= np.arange(begins.start, begins.stop)[:, None], self.working_bytes[last_unit], 0.0)
        # What lies before the first end's last unit, for every begin: maxima from there backwards.
        before = np.maximum.accumulate(np.append(self.working_bytes[begins.start : ends.start], 0.0)[::-1])[::-1]
        count = min(len(before), len(begins))
        largest[:count, 0] = np.maximum(largest[:count, 0], before[:count])
        return np.maximum.accumulate(largest, axis=1)

    def crossing_seconds(self) -> Floats:
        """For each cut, what all values that cross it would cost: the dearer, the less likely a good cut."""
        sends = self.communication.corners[:, 0] == 0
        corners, weights = self.communication.corners[sends], self.communication.weights[sends]
        size = len(self.cuts) + 1
        return (np.bincount(corners[:, 2], weights, size) - np.bincount(corners[:, 3], weights, size)).cumsum()[:-1]


def on_grid(values: Floats) -> Floats:
    """Rounded to the multiples of a power of two of which the total has 2 ** _BITS at most."""
    total = float(np.abs(values).sum())
    if not total:
        return values.astype(np.float64)
    step = math.ldexp(1.0, math.frexp(total)[1] - _BITS)
    return np.rint(values / step) * step


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], on_grid(np.array(values, dtype=np.float64)).cumsum()])


def _between(prefix: Floats, begins: slice, ends: slice) -> Floats:
    return prefix[ends] - prefix[begins, None]


def _touches(producer: int, readers: Sequence[int], num_units: int) -> Iterator[tuple[int, int, int, int]]:
    """For each reader, the ranges of stages that begin behind `producer` and read it there first: (first begin, end begin, first end,
    end end)."""
    before = producer
    for reader in sorted(set(readers)):
        yield before + 1, reader + 1, reader + 1, num_units + 1
        before = reader
