"""What the backward reads of the forward lies in host memory or in a file meanwhile (`autopar.pipeline.stays` draws it)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
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
from autopar.pipeline.stays import Stay, Trip, Trips, copied, moved, staging_bytes, stays, trips, waiting_seconds

logger = logging.getLogger("autopar")

# In how many parts memories are moved: each is a walk through the schedule.
MAX_TRIES = 32
# A gain below this share of the peak is not worth a copy.
LEAST_GAIN = 0.005


@dataclass(frozen=True)
class OffloadActivations:
    """Copy saved values away behind their last use in the forward, and back ahead of their first one in the backward.

    Those go first that are not used at the peak of the rank, the longest first, then those at what is the peak then, until it falls
    by less than is away, but for what is on its way. Under a budget those go that are the least likely to be waited for, until the step
    is within that, and of these as few as it takes: none if it fits. Each memory is copied once, with all that lies in it. By place
    along `pp` those go that are `planned`, where a plan has that.

    Reads: a `ScheduleProgram` without FREEs, in its final order. Writes: COPY and its WAITs; what reads in the backward reads what came
    back. Ensures: what is away is nobody's operand meanwhile.
    """

    offload: Offload | None
    cluster: Cluster
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    planned: Sequence[Sequence[str]] | None = None
    name: str = "offload activations"

    @property
    def memory(self) -> Memory | None:
        if self.offload is None:
            return None
        assert self.offload.activations != "auto", "`autopar.reports.weighed` settles that"
        return self.offload.activations

    def decide(self, program: ScheduleProgram) -> Trips:
        memory = self.memory
        if memory is None:
            return Trips("host", tuple(() for _ in program.places))
        cost = CostModel(self.cluster, program.mesh)
        clock = simulate(program, fragment_seconds(program, cost), links_of(self.cluster, program.mesh), has_memory=False)
        sizes = RankSizes(self.budget, device=program.device)
        places = [
            _Place(schedule, [0.0, *ends], memory, cost, self.offload.smallest_bytes if self.offload else 0, sizes)
            for schedule, ends in zip(program.places, clock.instruction_seconds, strict=True)
        ]
        chosen = self._chosen(places)
        found = [each.decide() if chosen is None else each.taking(chosen[number]) for number, each in enumerate(places)]
        chosen, reasons, fits = zip(*found, strict=True)
        return Trips(memory, chosen, reasons, all(fits))

    def _chosen(self, places: Sequence[_Place]) -> list[list[Stay]] | None:
        """What the plan moves; None without one, and where it is for another schedule. Says in the log why not."""
        if self.planned is None:
            return None
        known = [{name: stay for stay in each.stays(0) for name in stay.names} for each in places]
        names = self.planned if len(self.planned) == len(places) else [()] * len(places)
        missing = [name for found, wanted in zip(known, names, strict=True) for name in wanted if name not in found]
        if missing or len(self.planned) != len(places):
            why = f"nothing called {missing[0]} may be away" if missing else f"it has {len(self.planned)} places, here are {len(places)}"
            logger.warning("what the plan moves off the device does not fit: %s; it is chosen anew", why)
            return None
        return [list(dict.fromkeys(found[name] for name in wanted)) for found, wanted in zip(known, names, strict=True)]

    def apply(self, program: ScheduleProgram, decision: Trips) -> ScheduleProgram:
        if not any(decision.places):
            return program
        places = [moved(schedule, chosen, decision.memory) for schedule, chosen in zip(program.places, decision.places, strict=True)]
        return program.with_places(places, buffers={name: each for schedule in places for name, each in schedule.buffers.items()})

    def written(self, program: ScheduleProgram, decision: Trips) -> dict[str, object]:
        places = [[[list(each.names), each.out, each.gone, each.back, each.needed] for each in chosen] for chosen in decision.places]
        return {"places": places, "reasons": list(decision.reasons), "fits": decision.fits}

    def read(self, program: ScheduleProgram, value: Mapping[str, Any]) -> Trips:
        places = tuple(tuple(Trip(tuple(names), *numbers) for names, *numbers in chosen) for chosen in value["places"])
        return Trips(self.memory or "host", places, tuple(value["reasons"]), value["fits"])


@dataclass(frozen=True)
class _Place:
    """The ranks at one place along `pp`; `starts` is when instructions begin, and when the last is over."""

    schedule: Schedule
    starts: Sequence[float]
    memory: Memory
    cost: CostModel
    least_bytes: int
    sizes: RankSizes

    def decide(self) -> tuple[tuple[Trip, ...], str, bool]:
        """The trips of those stays that are away at the peak of the rank, wherever that comes to be then, as many as it takes; why, and
        whether the rank holds no more than it may."""
        known = sorted((each for each in self.stays(self.least_bytes) if self._is_long(each)), key=self._rank)
        before = best = now = self._memory(())
        chosen, few, at_once = list[Stay](), list[Stay](), math.ceil(len(known) / MAX_TRIES)
        for _ in range(2 * MAX_TRIES):
            peak = max(now.steps, key=lambda step: step.during_bytes).position if now.steps else 0
            more = [each for each in known if each.left < peak < each.needed and each not in chosen][:at_once]
            if not more or best.peak_bytes <= self._limit:
                break
            chosen += more
            now = self._memory(chosen)
            if now.peak_bytes <= self._limit or self._is_better(before, best, now, chosen):
                best, few = now, list(chosen)
        best, few = self._trimmed(best, few)
        while len(leaving := {each.names for each in self._trips(few)}) < len(few):  # the others keep no link busy
            few = [each for each in few if each.names in leaving]
            best = self._memory(few)
        fits = not self.sizes.budget.is_finite or best.peak_bytes <= self._limit
        return tuple(self._trips(few)), self._reason(before, best, few, bool(known)), fits

    def stays(self, least_bytes: int) -> list[Stay]:
        return stays(self.schedule, self.starts, least_bytes)

    def taking(self, chosen: Sequence[Stay]) -> tuple[tuple[Trip, ...], str, bool]:
        """As `decide`, of what the plan has."""
        before, now = self._memory(()), self._memory(chosen)
        return tuple(self._trips(chosen)), f"by the plan: {self._reason(before, now, chosen, True)}", False

    def _rank(self, stay: Stay) -> tuple[float, float]:
        """Those first that are away longest; under a budget those that are as long as most copies of theirs: the least likely to be
        waited for."""
        seconds, copy = self._seconds(stay), self.cost.copy_seconds(self.memory, stay.num_bytes)
        return (-seconds / copy if self.sizes.budget.is_finite and copy else 0.0), -seconds

    def _is_better(self, before: RankMemory, best: RankMemory, now: RankMemory, chosen: Sequence[Stay]) -> bool:
        return now.peak_bytes < (1 - LEAST_GAIN) * best.peak_bytes and self._brings_enough(before, now, chosen)

    def _trimmed(self, best: RankMemory, few: list[Stay]) -> tuple[RankMemory, list[Stay]]:
        """Without those that the budget does not need: what adds most time goes first, then what is largest."""
        if best.peak_bytes > self._limit:
            return best, few
        added = {each: self._waits(few) - self._waits([other for other in few if other != each]) for each in few}
        for each in sorted(few, key=lambda one: (-added[one], -one.num_bytes))[: 2 * MAX_TRIES]:
            fewer = [other for other in few if other != each]
            if (now := self._memory(fewer)).peak_bytes <= self._limit:
                best, few = now, fewer
        return best, few

    def _waits(self, chosen: Sequence[Stay]) -> float:
        sizes = {each.names: each.num_bytes for each in chosen}
        return waiting_seconds(self._trips(chosen), self.starts, lambda trip: self.cost.copy_seconds(self.memory, sizes[trip.names]))

    def _reason(self, before: RankMemory, best: RankMemory, few: Sequence[Stay], is_any_long: bool) -> str:
        limit = f", of {in_bytes(self._limit)} that a rank may hold" if self.sizes.budget.is_finite else ""
        if not self._trips(few):
            why = "it fits" if before.peak_bytes <= self._limit else "it would not help" if is_any_long else "nothing is saved long enough"
            return f"nothing is moved, {why}: at most {in_bytes(before.peak_bytes)} a rank{limit}"
        away = f"{len(self._trips(few))} memories, {in_bytes(best.parked_bytes[self.memory])} at a time"
        peaks = f"{in_bytes(before.peak_bytes)} → {in_bytes(best.peak_bytes)}"
        return f"{away}, to {self.memory} memory and back; at most {peaks} a rank{limit}"

    def _brings_enough(self, before: RankMemory, now: RankMemory, chosen: Sequence[Stay]) -> bool:
        """Whether the peak falls by what is away at a time, less what is on its way; under a budget whatever helps."""
        away = now.parked_bytes.get(self.memory, 0.0) - staging_bytes(chosen)
        return self.sizes.budget.is_finite or before.peak_bytes - now.peak_bytes >= away

    @property
    def _limit(self) -> float:
        """What buffers may take: all of the budget but the state of the optimizer; nothing where there is none, so that all is too much."""
        budget = self.sizes.budget
        if not budget.is_finite:
            return 0.0
        named = zip(self.schedule.signature.inputs, self.schedule.inputs, strict=True)
        return budget.capacity_bytes - sum(budget.optimizer.state_bytes(item, self.schedule.bytes_of(name)) for item, name in named)

    def _seconds(self, stay: Stay) -> float:
        return self.starts[stay.needed] - self.starts[stay.left + 1]

    def _is_long(self, stay: Stay) -> bool:
        """Whether it is away at all, by the clock."""
        return self._seconds(stay) > 2 * self.cost.copy_seconds(self.memory, stay.num_bytes)

    def _trips(self, chosen: Sequence[Stay]) -> list[Trip]:
        return trips(chosen, self.starts, lambda size: self.cost.copy_seconds(self.memory, size))

    def _memory(self, chosen: Sequence[Stay]) -> RankMemory:
        """With a step for each instruction that there was."""
        found = self._trips(chosen)
        schedule, written = moved(self.schedule, found, self.memory), copied(self.schedule, found, self.memory)
        freed = iter(with_frees(schedule.instructions, {*schedule.inputs, *schedule.outputs}))
        groups = ([one for _ in group for one in next(freed)] for group in written)
        return schedule_memory(schedule, self.sizes.of(schedule), groups)
