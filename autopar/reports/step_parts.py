"""What a step's time is spent on, part by part, of the rank that takes longest: what limits it is the largest part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.driver.compiled import Compiled
from autopar.ir.instructions import Launch
from autopar.ir.keys import SOURCE, STRATEGY
from autopar.ir.pattern import pattern_of
from autopar.ir.program import Program
from autopar.pipeline.exposure import exposure, predicted_intervals
from autopar.pipeline.fragment_prices import fragment_seconds, on_paper
from autopar.pipeline.report import StepOnPaper
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stage_work import Work
from autopar.reports.communication import over
from autopar.reports.summary import calls, places_of, seconds

ARITHMETIC, TRAFFIC, STARTS = "arithmetic", "memory traffic", "starting ops"
WAITS, HANDOVER, UPDATE = "waiting for other stages", "handing over parameters", "update"
COMMUNICATION, COPIES = "communication", "copies to and from the device"
# Parts that take less of a step than this are not told apart.
_SMALL = 0.015


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by what they are spent on; of communication what nothing hides. `num_starts`: ops that a rank starts."""

    parts: Mapping[str, float]
    num_starts: int

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> tuple[str, float]:
        """The largest part, all communication as one, and its share."""
        sums: dict[str, float] = {}
        for name in self.parts:
            kind = COMMUNICATION if name.startswith(COMMUNICATION) else name
            sums[kind] = sums.get(kind, 0.0) + self.share(name)
        return max(sums.items(), key=lambda each: each[1])

    def share(self, name: str) -> float:
        """Of the step; 0 for what is no part of it."""
        return self.parts.get(name, 0.0) / self.total if self.total else 0.0

    def shown(self) -> Iterator[tuple[str, float]]:
        """Parts with their shares, the largest first, without what takes next to nothing."""
        for name in sorted(self.parts, key=lambda name: -self.parts[name]):
            if self.share(name) >= _SMALL:
                yield name, self.share(name)


def step_parts(compiled: Compiled, cost: CostModel) -> StepParts:
    """As the cost model has it: what ops take, and what the schedule takes longer than these, with its buckets, its order and its host."""
    program, places = compiled.program, places_of(compiled)
    found = seconds(program, cost, places)
    place = found.get("rank", 0)
    starts = _starts(program, places, place)
    starting = min(starts * cost.cluster.device.launch_seconds, found["memory"])
    parts = {ARITHMETIC: found["compute"], TRAFFIC: found["memory"] - starting, STARTS: starting}
    for name, value in _beside_ops(compiled.schedule, cost, place, sum(parts.values())).items():
        parts[name] = parts.get(name, 0.0) + value
    if program.signature.outputs_of("gradient"):
        paper = StepOnPaper(program, cost, compiled.order)
        parts[HANDOVER], parts[UPDATE] = paper.handover_seconds, paper.update_seconds
    return StepParts({name: value for name, value in parts.items() if value > 0}, starts)


def _beside_ops(program: ScheduleProgram, cost: CostModel, place: int, ops_seconds: float) -> dict[str, float]:
    """What a step at this place along `pp` takes longer than its ops, part by part: copies and other stages that it waits for, and all
    that collectives cost, by axes in the proportion of what each takes by itself."""
    simulation, schedule = on_paper(program, cost, has_memory=False), program.places[place]
    known = exposure([(schedule, predicted_intervals(simulation)[place])])
    rest = max(simulation.step_seconds - ops_seconds, 0.0)
    copies = min(known.copy_seconds, rest)
    # The last event of a step may be another rank's; what this one does not wait for other stages, it spends on collectives.
    waits = min(simulation.step_seconds - known.step_seconds + known.bubble_seconds, rest - copies) if len(program.places) > 1 else 0.0
    price, alone = fragment_seconds(program, cost), dict[str, float]()
    for each in schedule.instructions:
        if isinstance(each, Launch) and (axes := over(each)):
            alone[axes] = alone.get(axes, 0.0) + price(each)
    left, total = rest - copies - waits, sum(alone.values())
    parts = {f"{COMMUNICATION} over {axes}": left * value / total for axes, value in alone.items() if total}
    others = f"{COMMUNICATION} over pp" if len(program.places) > 1 else STARTS
    return {WAITS: waits, COPIES: copies, **(parts or {others: left})}


def _starts(program: Program, places: Sequence[int], rank: int) -> int:
    work = Work(program)
    return sum(work.runs(node) for node in calls(program) if not is_view(node) for stage in work.stages[node] if places[stage] == rank)


def where_time_goes(program: Program, cost: CostModel) -> list[tuple[str, float]]:
    """Kinds of modules with their shares of what ops take, collectives aside; the dearest first."""
    work, found = Work(program), dict[str, float]()
    for node in calls(program):
        name = kind_of(node)
        found[name] = found.get(name, 0.0) + cost.node(node, STRATEGY[node]).seconds * work.runs(node) * len(work.stages[node])
    total = sum(found.values())
    return sorted(((name, value / total) for name, value in found.items()), key=lambda each: -each[1]) if total else []


def kind_of(node: Node) -> str:
    """`model.layers.*.mlp` of whatever is in such a module; `lm_head` of what is outside of repeated ones."""
    parts = pattern_of(SOURCE[node].module).split(".") if node in SOURCE else [""]
    last = max((index for index, part in enumerate(parts) if part == "*"), default=-1)
    return ".".join(parts[: last + 2] if last >= 0 else parts[:2])
