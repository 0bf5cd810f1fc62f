"""A pipeline in the user's words: its stages, its order, how long a step takes, and why it is cut where it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

from torch.fx import Node

from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.ir.actions import PipelineSchedule
from autopar.ir.keys import DIMS, SHARDING
from autopar.ir.program import Input, Program
from autopar.ir.units import in_bytes, in_seconds
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.order import live_microbatches
from autopar.pipeline.priced import price_pipeline, transfer_bytes
from autopar.pipeline.simulate import Simulation, simulate
from autopar.pipeline.stage_work import Work

# How many lines of a grid are shown, or its first block: the rest of a schedule is like its middle.
_MAX_LINES = 12
_SHOWN_EVENTS = 4


@dataclass(frozen=True)
class StepOnPaper:
    """One step of a pipeline, priced and simulated. Seconds and bytes are those of one rank at each place along `pp`."""

    program: Program
    cost: CostModel
    order: PipelineSchedule

    @cached_property
    def prices(self) -> PipelineCost:
        speeds = tuple(self.cost.cluster.speed(rank) for rank in self.order.stages)
        return price_pipeline(self.program, self.cost, self.order.num_stages, speeds)

    @cached_property
    def simulation(self) -> Simulation:
        return simulate(self.executed, self.prices)

    @property
    def executed(self) -> PipelineSchedule:
        """The order, of a program without gradients its forwards alone."""
        if self.program.signature.outputs_of("gradient"):
            return self.order
        return replace(self.order, orders=tuple(tuple(each for each in row if each.kind == "F") for row in self.order.orders))

    @cached_property
    def update_seconds(self) -> float:
        """What the optimizer takes on the rank that holds most."""
        return max(
            sum(self.cost.update(DIMS[node][0], item.dtype, SHARDING[node][0], item.requires_grad) for item, node in held)
            for held in self._parameters
        )

    @cached_property
    def handover_seconds(self) -> float:
        """What the host takes to hand over parameters and gradients, on the rank that has most of them."""
        return self.cost.cluster.device.host.parameter_seconds * max(map(len, self._parameters))

    @cached_property
    def _parameters(self) -> list[list[tuple[Input, Node]]]:
        """Of each rank."""
        work = Work(self.program)
        ranks: list[list[tuple[Input, Node]]] = [[] for _ in range(self.order.num_ranks)]
        for item, node in self.program.named_inputs():
            if item.kind == "parameter":
                for rank in {self.order.stages[stage] for stage in work.reading(node) or {0}}:
                    ranks[rank].append((item, node))
        return ranks

    @property
    def beside_seconds(self) -> float:
        """What a step takes beside the order: parameters and gradients handed over, and the update."""
        return self.handover_seconds + self.update_seconds

    @property
    def seconds(self) -> float:
        """Of a step, the update included."""
        return self.simulation.step_seconds + self.beside_seconds


class StageSummary(TypedDict):
    """One stage. Of a microbatch: seconds (forward, input gradient, weight gradient), saved_bytes, sent_bytes (forward, backward); once a
    step: held_bytes (parameters, gradients, optimizer state), reduce_seconds.

    `rank` is its place along `pp`, `first` its first op; it holds saved values of at most `live_microbatches`.
    """

    rank: int
    first: str
    seconds: dict[str, float]
    reduce_seconds: float
    held_bytes: float
    saved_bytes: float
    live_microbatches: int
    sent_bytes: dict[str, float]


class PipelineSummary(TypedDict):
    """A pipeline as a dict that goes to JSON.

    schedule        the name of the order
    step_seconds    simulated, from the first start to the last end on any rank; update_seconds: the optimizer's, after that
    bubble          the share of that time that ranks idle, on average
    critical_path   what the end waits for, first to last
    peak_bytes      of each rank
    """

    schedule: str
    num_microbatches: int
    stages: list[StageSummary]
    step_seconds: float
    update_seconds: float
    bubble: float
    critical_path: list[str]
    peak_bytes: list[float]


def pipeline_summary(compiled: Compiled, cost: CostModel) -> PipelineSummary:
    order, paper = compiled.order, StepOnPaper(compiled.program, cost, compiled.order)
    sent, live = transfer_bytes(Work(compiled.program), cost), live_microbatches(order)
    stages: list[StageSummary] = []
    for number, price in enumerate(paper.prices.stages):
        stages.append(
            {
                "rank": order.stages[number],
                "first": compiled.stages.placement.stages[number].first_name if compiled.stages is not None else "",
                "seconds": {
                    "forward": price.forward_seconds,
                    "input_gradient": price.input_gradient_seconds,
                    "weight_gradient": price.weight_gradient_seconds,
                },
                "reduce_seconds": price.reduce_seconds,
                "held_bytes": price.held_bytes,
                "saved_bytes": price.saved_bytes,
                "live_microbatches": live[number],
                "sent_bytes": {
                    phase: sum(size for (source, _, direction), size in sent.items() if (source, direction) == (number, letter))
                    for phase, letter in (("forward", "F"), ("backward", "B"))
                },
            }
        )
    return {
        "schedule": order.name,
        "num_microbatches": order.num_microbatches,
        "stages": stages,
        "step_seconds": paper.simulation.step_seconds,
        "update_seconds": paper.update_seconds,
        "bubble": paper.simulation.makespan_bubble_rate,
        "critical_path": [event.name for event in paper.simulation.critical_path],
        "peak_bytes": list(paper.simulation.peak_bytes),
    }


def pipeline_lines(compiled: Compiled, cost: CostModel) -> Iterator[str]:
    """Stages, order, the simulated step, and the reason for the cuts; of one stage the step alone."""
    order, paper = compiled.order, StepOnPaper(compiled.program, cost, compiled.order)
    if order.num_stages > 1 and compiled.stages is not None:
        yield "stages, for a microbatch (ms and GiB on one rank; *: the slowest)"
        yield from (f"  {line}" for line in str(compiled.stages.placement).splitlines())
    if order.num_ranks > 1:
        yield from shortened(str(paper.executed).splitlines())
    else:
        yield f"{order.num_microbatches} microbatches, one after another"
    found = paper.simulation
    idle = f", of which ranks idle {found.makespan_bubble_rate:.1%}" if order.num_ranks > 1 else ""
    yield f"a step takes {in_seconds(found.step_seconds)} on paper{idle}; the update {in_seconds(paper.update_seconds)} more"
    yield f"it waits for {_path(found)}"
    yield "at most " + ", ".join(f"{in_bytes(peak)} on rank {rank}" for rank, peak in enumerate(found.peak_bytes))
    yield from cut_lines(compiled)
    yield from version_lines(compiled)
    if order.num_stages > 1:
        yield "clip gradients by parallel.clip_grad_norm_: on processes torch's own sees the gradients of one stage alone"


def shortened(lines: list[str]) -> Iterator[str]:
    """The first blocks of a grid, and how many lines more there are."""
    ends = [number for number, line in enumerate(lines) if not line] + [len(lines)]
    shown = max([end for end in ends if end <= _MAX_LINES], default=ends[0])
    yield from lines[:shown]
    if shown < len(lines):
        yield f"… {len(lines) - shown} more lines: print(parallel.compiled.order)"


def version_lines(compiled: Compiled) -> Iterator[str]:
    """How old the weights are that gradients are computed at, where a step updates more than once."""
    places = compiled.updating.places if compiled.updating is not None else ()
    number = max((each.versions.num_updates for each in places), default=1)
    if number > 1:
        ages, stages = (", ".join(map(str, of)) for of in ((each.versions.staleness for each in places), range(len(places))))
        yield f"weights: {number} updates a step; gradients are at most {ages} updates old on stages {stages}"


def cut_lines(compiled: Compiled) -> Iterator[str]:
    """Why the forward is cut there, and what the next-best cut would cost."""
    decision = compiled.stages
    if decision is None or len(decision.placement.stages) < 2:
        return
    slowest = max(range(len(decision.placement.stages)), key=lambda stage: decision.placement.seconds[stage])
    takes = f"the slowest stage, {slowest}, takes {in_seconds(decision.placement.slowest_seconds)} a microbatch"
    if decision.reason:
        yield f"cut {decision.reason}: {takes}"
        return
    other = decision.next_best
    if other is None:
        yield f"cut by cost: {takes}; no cut can be moved"
        return
    moved = next(stage for stage, pair in enumerate(zip(decision.placement.starts, other.starts, strict=True)) if pair[0] != pair[1])
    added = in_seconds(other.slowest_seconds - decision.placement.slowest_seconds, sign=True)
    yield f"cut by cost: {takes}; with stage {moved} from {other.stages[moved].first_name} on, the nearest other cut, {added}"


def _path(found: Simulation) -> str:
    names = [event.name for event in found.critical_path]
    if len(names) > 2 * _SHOWN_EVENTS:
        names = [*names[:_SHOWN_EVENTS], f"… {len(names) - 2 * _SHOWN_EVENTS} more …", *names[-_SHOWN_EVENTS:]]
    return " ".join(names)
