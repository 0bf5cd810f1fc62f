"""Parameters lie in host memory or in files, and are on the device while it reads them (`autopar.pipeline.visits` draws it)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.cost.rank_memory import RankMemory
from autopar.cost.rank_sizes import RankSizes
from autopar.cost.schedule_memory import schedule_memory
from autopar.ir.instructions import Memory
from autopar.ir.lifetimes import with_frees
from autopar.ir.offload import Offload
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_bytes
from autopar.passes.schedule.overlap_communication import links_of
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import simulate
from autopar.pipeline.visits import (
    Span,
    Visit,
    Visits,
    joined,
    most_needed_bytes,
    parameters_of,
    pauses_of,
    read_spans,
    table_of,
    visited,
    visits,
)

# A parameter that is read again within so many times what its copy takes stays on the device meanwhile.
SHORT = 2.0
# So much of what one instruction needs comes ahead of the others; less where a budget lacks the room.
AHEAD = (1.0, 0.5, 0.0)


@dataclass(frozen=True)
class OffloadParameters:
    """Copy parameters to the device ahead of what reads them, and drop the copies behind it.

    A copy stays where the next reader comes too soon for another one, by the clock: the same microbatch's next op, or the next
    microbatch's. What is too small to be worth copies is copied once before a PAUSE and once behind it. All parameters lie there, budget
    or not: where they lie is of the model, and not of a call. While one layer computes the next one's come, or under a budget as much of
    them as fits.

    Reads: a `ScheduleProgram` without FREEs, in its final order. Writes: where parameters lie, COPY and its WAITs. Ensures: what computes
    or communicates reads copies on the device.
    """

    offload: Offload | None
    cluster: Cluster
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    name: str = "offload parameters"

    @property
    def memory(self) -> Memory | None:
        return None if self.offload is None else self.offload.parameters

    def decide(self, program: ScheduleProgram) -> Visits:
        if self.offload is None or self.memory is None:
            return Visits("host", tuple(() for _ in program.places))
        cost = CostModel(self.cluster, program.mesh)
        clock = simulate(program, fragment_seconds(program, cost), links_of(self.cluster, program.mesh), has_memory=False)
        sizes = RankSizes(self.budget, device=program.device)
        places = [
            _Place(schedule, [0.0, *ends], self.memory, cost, self.offload.smallest_bytes, sizes)
            for schedule, ends in zip(program.places, clock.instruction_seconds, strict=True)
        ]
        chosen = [each.decide() for each in places]
        reasons = tuple(each.reason(found) for each, found in zip(places, chosen, strict=True))
        return Visits(self.memory, tuple(map(tuple, chosen)), reasons)

    def apply(self, program: ScheduleProgram, decision: Visits) -> ScheduleProgram:
        if self.memory is None:
            return program
        pairs = [*zip(program.places, decision.places, strict=True)]
        buffers = dict(program.places[0].buffers)
        for schedule, chosen in pairs:
            buffers |= table_of(schedule, chosen, decision.memory)
        return program.with_places([visited(schedule, chosen, decision.memory) for schedule, chosen in pairs], buffers=buffers)

    def written(self, program: ScheduleProgram, decision: Visits) -> dict[str, object]:
        return {"places": [[list(each) for each in chosen] for chosen in decision.places], "reasons": list(decision.reasons)}

    def read(self, program: ScheduleProgram, value: Mapping[str, Any]) -> Visits:
        places = tuple(tuple(Visit(*each) for each in chosen) for chosen in value["places"])
        return Visits(self.memory or "host", places, tuple(value["reasons"]))


@dataclass(frozen=True)
class _Place:
    """The ranks at one place along `pp`; `starts` is when instructions begin, and when the last is over."""

    schedule: Schedule
    starts: Sequence[float]
    memory: Memory
    cost: CostModel
    least_bytes: int
    sizes: RankSizes

    def decide(self) -> list[Visit]:
        spans = {name: joined(each, self._is_short(name)) for name, each in read_spans(self.schedule).items()}
        most, found = most_needed_bytes(self.schedule, spans), list[Visit]()
        for share in AHEAD:
            found = visits(self.schedule, spans, self.starts, self._seconds, share * most)
            if not self.sizes.budget.is_finite or self._memory(self._visited(found)).peak_bytes <= self.sizes.budget.capacity_bytes:
                break
        return found

    def _is_short(self, name: str) -> Callable[[Span, Span], bool]:
        size, pauses = self.schedule.bytes_of(name), pauses_of(self.schedule)
        limit = SHORT * self._seconds(size)

        def is_short(one: Span, other: Span) -> bool:
            if any(one[1] < pause < other[0] for pause in pauses):
                return False
            return size < self.least_bytes or self.starts[other[0]] - self.starts[one[1] + 1] <= limit

        return is_short

    def _seconds(self, size: float) -> float:
        return self.cost.copy_seconds(self.memory, size)

    def reason(self, chosen: Sequence[Visit]) -> str:
        names = parameters_of(self.schedule)
        held = sum(map(self.schedule.bytes_of, names))
        copied = sum(self.schedule.bytes_of(each.name) for each in chosen)
        where = "host memory" if self.memory == "host" else "files"
        peaks = f"{in_bytes(self._memory(self.schedule).peak_bytes)} → {in_bytes(self._memory(self._visited(chosen)).peak_bytes)}"
        times = f", copied to the device {copied / held:.1f} times a step" if held else ""
        return f"{len(names)} parameters, {in_bytes(held)}, in {where}{times}; at most {peaks} a rank"

    def _visited(self, chosen: Sequence[Visit]) -> Schedule:
        return visited(self.schedule, chosen, self.memory)

    def _memory(self, schedule: Schedule) -> RankMemory:
        groups = with_frees(schedule.instructions, {*schedule.inputs, *schedule.outputs})
        return schedule_memory(schedule, self.sizes.of(schedule), groups)
