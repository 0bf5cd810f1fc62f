"""Where the forward is cut into the stages of a pipeline, by cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypedDict

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.errors import MemoryBudgetError
from autopar.ir.actions import PipelineSchedule
from autopar.ir.keys import STAGE
from autopar.ir.program import Program
from autopar.pipeline.assign import assign_stages
from autopar.pipeline.holders import Held, starts_where
from autopar.pipeline.order import live_microbatches
from autopar.pipeline.placement import PlacedStage, StagePlacement, place, place_training, placed_at
from autopar.pipeline.placement_problem import Devices
from autopar.pipeline.placement_units import ProgramLine, line_of
from autopar.plans.decisions import StageDecision
from autopar.plans.json import Json
from autopar.plans.keys import cut_keys
from autopar.plans.plan import Plan


class WrittenStages(TypedDict):
    """A `StageDecision` on its way to other ranks; `cuts` are as in a plan."""

    cuts: list[str]
    reason: str
    stages: list[dict[str, Any]]


def _train_all(placement: StagePlacement, training: Collection[int], ranks: Sequence[int]) -> bool:
    """Whether each rank, `ranks[s]` of stage s, has a unit that reads a parameter that trains."""
    return {ranks[stage] for unit, stage in enumerate(placement.stage_of) if unit in training} == set(ranks)


@dataclass(frozen=True)
class PlaceStages:
    """Cut the forward into the stages of the program's order so that the slowest one is as fast as can be on `cluster`, within `budget`.

    One microbatch through one stage needs no cut.
    Where `held` says which stages hold the parameters already, the cuts are those that leave them there; else they are those of
    `plan`, if it has as many stages and every op that it cuts at is there.

    Reads: PHASE, STRATEGY, SHARDING, DROPPED, REPEATABLE. Writes: STAGE of every call but those that each stage makes for itself.
    Ensures: activations flow to later stages, gradients to earlier ones.
    """

    cluster: Cluster
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    held: Held | None = None
    plan: Plan | None = None
    name: str = "place stages"

    def decide(self, program: Program) -> StageDecision | None:
        """Raises `PlanError` for more stages than there is work, and `MemoryBudgetError` when no placement fits."""
        if program.order.is_single:
            return None
        cost = CostModel(self.cluster, program.mesh, self.budget.optimizer)
        found = line_of(program, cost)
        devices, live = self._devices(cost, program.order), live_microbatches(program.order)
        starts, reason = self._given(found, program)
        if starts is not None:
            placement = placed_at(found.line, devices, live, starts)
        else:
            try:
                placement = place(found.line, devices, live)
            except MemoryBudgetError:
                # Stages keep values of several microbatches, which the search has not counted: there is more to compute again.
                found = line_of(program, cost, keeps_repeatable=False)
                placement = place(found.line, devices, live)
            if not _train_all(placement, found.training, program.order.stages):
                training = place_training(found.line, devices, live, found.training)
                placement, reason = (placement, "") if training is None else (training, "so that an optimizer can be made on each rank")
        stages = found.forward_stages(placement.stage_of)
        cuts = tuple(found.nodes[start][0].name for start in placement.starts[1:])
        others = partial(placed_at, found.line, devices, live)
        return StageDecision(placement, {node.name: stage for node, stage in stages.items()}, cuts, reason, others)

    def _given(self, line: ProgramLine, program: Program) -> tuple[tuple[int, ...] | None, str]:
        """The first unit of each stage where that is decided already, and by what."""
        if self.held:
            return starts_where(line, program, self.held, program.order.num_stages), "as the first capture placed it"
        planned = self.plan.starts_on(program, line.nodes, program.order.num_stages) if self.plan is not None else None
        return planned, "by the plan" if planned is not None else ""

    def apply(self, program: Program, decision: StageDecision | None) -> Program:
        if decision is None:
            return program
        program = program.copy()
        forward = {node: decision.stages[node.name] for node in program.graph.nodes if node.name in decision.stages}
        for node, stage in assign_stages(program, forward, program.order.num_stages).items():
            STAGE[node] = stage
        return program

    def written(self, program: Program, decision: StageDecision | None) -> dict[str, Json] | None:
        if decision is None:
            return None
        stages = [asdict(stage) for stage in decision.placement.stages]
        return {"cuts": cut_keys(program, decision.cuts), "reason": decision.reason, "stages": stages}

    def read(self, program: Program, value: WrittenStages | None) -> StageDecision | None:
        """Cut where rank 0 did, at what it takes there."""
        if value is None:
            return None
        plan = Plan(program.mesh, schedule=program.order, cuts=tuple(value["cuts"]))
        here = replace(self, held=None, plan=plan).decide(program)
        placement = StagePlacement(tuple(PlacedStage(**stage) for stage in value["stages"]))
        if here is None or here.placement.starts != placement.starts:
            return here
        return replace(here, placement=placement, reason=value["reason"])

    def _devices(self, cost: CostModel, order: PipelineSchedule) -> Devices:
        """What stages run on; those of one rank share its memory."""
        latency, seconds_per_byte = cost.send()
        sharing = Counter(order.stages)
        speeds = tuple(self.cluster.speed(rank) for rank in order.stages)
        return Devices(speeds, tuple(self.budget.capacity_bytes / sharing[rank] for rank in order.stages), seconds_per_byte, latency)
