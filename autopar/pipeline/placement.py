"""Where a line of units is cut into pipeline stages: the slowest stage as fast as can be, every stage within its memory.

A stage takes the forward and backward seconds of its units on its device, and the sends at its borders: each value that comes
in or goes out is paid once at each end (a value read two stages on goes straight there; one read by several later stages is
paid once by its producer), and its gradient on the way back. It holds what its units hold, a shared parameter once, what they
save and what it receives for every live microbatch, and the largest working set of a unit. The answer is the best there is,
see `autopar.pipeline.placement_search`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import MemoryBudgetError
from autopar.pipeline.placement_problem import Devices, Line, Shared, Unit, Value, check_sizes
from autopar.pipeline.placement_search import best_starts, closest_starts
from autopar.pipeline.placement_tables import PlacementTables

__all__ = ["Devices", "Line", "PlacedStage", "Shared", "StagePlacement", "Unit", "Value", "place", "place_training", "placed_at"]

_GIB = 1 << 30
_NAME_WIDTH = 40


@dataclass(frozen=True)
class PlacedStage:
    """The units from `first` on, and what they take on this stage's device, per microbatch."""

    first: int
    num_units: int
    first_name: str
    compute_seconds: float
    communication_seconds: float
    held_bytes: float
    # What the forward keeps and what came in from other stages, per live microbatch.
    saved_bytes: float
    received_bytes: float
    working_bytes: float
    live_microbatches: int
    capacity_bytes: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds

    @property
    def bytes(self) -> float:
        """At most, at any time."""
        return self.held_bytes + self.live_microbatches * (self.saved_bytes + self.received_bytes) + self.working_bytes


@dataclass(frozen=True)
class StagePlacement:
    """Contiguous stages, none empty. Prints as a table."""

    stages: tuple[PlacedStage, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first unit of each stage."""
        return tuple(stage.first for stage in self.stages)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Per stage, communication included."""
        return tuple(stage.seconds for stage in self.stages)

    @property
    def slowest_seconds(self) -> float:
        return max(self.seconds)

    @property
    def bytes(self) -> tuple[float, ...]:
        return tuple(stage.bytes for stage in self.stages)

    @property
    def stage_of(self) -> tuple[int, ...]:
        """For each unit the stage that it is on."""
        return tuple(number for number, stage in enumerate(self.stages) for _ in range(stage.num_units))

    def __str__(self) -> str:
        rows = [("stage", "first unit", "units", "ms", "compute + send", "GiB", "held + live × saved + working")]
        for number, stage in enumerate(self.stages):
            mark = " *" if stage.seconds == self.slowest_seconds else ""
            share = f"{stage.compute_seconds / stage.seconds if stage.seconds else 1:.1%}"
            parts = f"{_gib(stage.held_bytes)} + {stage.live_microbatches} × {_gib(stage.saved_bytes + stage.received_bytes)}"
            cells = (f"{stage.num_units}", f"{1e3 * stage.seconds:.4g}{mark}", f"{share} + {_percent(stage)}", _gib(stage.bytes))
            rows.append((str(number), _shortened(stage.first_name), *cells, f"{parts} + {_gib(stage.working_bytes)}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)


def place(line: Line, devices: Devices, live_microbatches: Sequence[int]) -> StagePlacement:
    """The placement whose slowest stage is fastest; of equal ones that with the least communication, then the most even one.

    `live_microbatches[s]`: of how many microbatches stage s holds saved values at once (1F1B: num_stages - s).
    Raises `PlanError` where there are fewer units than stages, and `MemoryBudgetError` where no placement fits.
    """
    check_sizes(line, devices, live_microbatches)
    tables = PlacementTables.of(line, devices, live_microbatches)
    starts = best_starts(tables)
    if starts is None:
        raise MemoryBudgetError(_what_lacks(placed_at(line, devices, live_microbatches, closest_starts(tables))))
    return _placed(tables, line, starts)


def place_training(line: Line, devices: Devices, live_microbatches: Sequence[int], training: Collection[int]) -> StagePlacement | None:
    """The best of the placements in which each stage begins at a unit that reads a parameter that trains (its number is in `training`),
    and the first stage has another one before. None where there are fewer such units than stages, or none of these fits."""
    check_sizes(line, devices, live_microbatches)
    if len(training) < devices.num_stages:
        return None
    tables = PlacementTables.of(line, devices, live_microbatches)
    starts = best_starts(tables.at(np.array([0, *sorted(training)[1:], len(line.units)])))
    return None if starts is None else _placed(tables, line, starts)


def placed_at(line: Line, devices: Devices, live_microbatches: Sequence[int], starts: Sequence[int]) -> StagePlacement:
    """The placement with these first units, whether it fits or not. Raises `PlanError` where there are fewer units than stages."""
    check_sizes(line, devices, live_microbatches)
    return _placed(PlacementTables.of(line, devices, live_microbatches), line, starts)


def _placed(tables: PlacementTables, line: Line, starts: Sequence[int]) -> StagePlacement:
    cuts = np.array([*starts, len(line.units)])
    assert len(starts) == tables.num_stages and cuts[0] == 0 and (np.diff(cuts) > 0).all(), starts
    tables = tables.at(cuts)
    stages: list[PlacedStage] = []
    for stage, first in enumerate(cuts[:-1].tolist()):
        here, there = range(stage, stage + 1), range(stage + 1, stage + 2)
        held = tables.held_bytes[stage + 1] - tables.held_bytes[stage] + tables.shared.tile(here, there)[0, 0]
        stages.append(
            PlacedStage(
                first=first,
                num_units=int(cuts[stage + 1]) - first,
                first_name=line.units[first].name,
                compute_seconds=float((tables.compute_seconds[stage + 1] - tables.compute_seconds[stage]) / tables.speeds[stage]),
                communication_seconds=float(tables.communication.tile(here, there)[0, 0]),
                held_bytes=float(held),
                saved_bytes=float(tables.saved_bytes[stage + 1] - tables.saved_bytes[stage]),
                received_bytes=float(tables.received.tile(here, there)[0, 0]),
                working_bytes=float(tables.working_bytes[stage]),
                live_microbatches=int(tables.live_microbatches[stage]),
                capacity_bytes=float(tables.capacity_bytes[stage]),
            )
        )
    return StagePlacement(tuple(stages))


def _what_lacks(closest: StagePlacement) -> str:
    """`closest` is the placement whose worst stage lacks least."""
    number = max(range(len(closest.stages)), key=lambda each: closest.stages[each].bytes - closest.stages[each].capacity_bytes)
    stage = closest.stages[number]
    lack, saved = stage.bytes - stage.capacity_bytes, stage.saved_bytes + stage.received_bytes
    return (
        f"no placement of {len(closest.stage_of)} units on {len(closest.stages)} pipeline stages fits in memory: at best stage {number} "
        f"(from {stage.first_name!r}) needs {_gib(stage.bytes)} GiB and may have {_gib(stage.capacity_bytes)}, {_gib(lack)} GiB too much: "
        f"{_gib(stage.held_bytes)} of parameters, gradients and optimizer state, {stage.live_microbatches} live microbatches of "
        f"{_gib(saved)}, {_gib(stage.working_bytes)} to work in. Use more stages, a schedule or more microbatches (smaller ones) "
        f"with less live at once, or raise memory_budget\n{closest}"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.3g}"


def _percent(stage: PlacedStage) -> str:
    return f"{stage.communication_seconds / stage.seconds if stage.seconds else 0:.1%}"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}"
