"""What a step's time is spent on, part by part, of the rank that takes longest: what limits it is the largest part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.driver.compiled import Compiled
from autopar.ir.keys import SOURCE, STRATEGY
from autopar.ir.pattern import pattern_of
from autopar.ir.program import Program
from autopar.pipeline.report import StepOnPaper
from autopar.pipeline.stage_work import Work
from autopar.reports.summary import calls, places_of, seconds

ARITHMETIC, TRAFFIC, STARTS = "arithmetic", "memory traffic", "starting ops"
WAITS, HANDOVER, UPDATE = "waiting for other stages", "handing over parameters", "update"
COMMUNICATION = "communication"
# Parts that take less of a step than this are not told apart.
_SMALL = 0.015


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by what they are spent on; communication as if nothing else ran meanwhile. `num_starts`: ops that a rank starts."""

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
    """As the cost model has it."""
    program, places = compiled.program, places_of(compiled)
    found = seconds(program, cost, places)
    starts = _starts(program, places, found.get("rank", 0))
    starting = min(starts * cost.cluster.device.launch_seconds, found["memory"])
    parts = {ARITHMETIC: found["compute"], TRAFFIC: found["memory"] - starting, STARTS: starting}
    parts |= {f"{COMMUNICATION} over {axes}": value for axes, value in found["communication"].items()}
    paper = StepOnPaper(program, cost, compiled.order)
    if compiled.order.num_ranks > 1:
        parts[WAITS] = max(paper.simulation.step_seconds - sum(parts.values()), 0.0)
    if program.signature.outputs_of("gradient"):
        parts[HANDOVER], parts[UPDATE] = paper.handover_seconds, paper.update_seconds
    return StepParts({name: value for name, value in parts.items() if value > 0}, starts)


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
