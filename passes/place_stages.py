"""Where the forward is cut into the stages of a pipeline, by cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost import CostModel
from autopar.hardware.cluster import Cluster
from autopar.keys import STAGE
from autopar.memory import MemoryBudget
from autopar.pipeline.actions import PipelineSchedule
from autopar.pipeline.assign import assign_stages
from autopar.pipeline.held import Held, starts_where
from autopar.pipeline.line import line_of
from autopar.pipeline.order import live_microbatches
from autopar.pipeline.placement import StagePlacement, place, placed_at
from autopar.pipeline.placement_problem import Devices
from autopar.program import Program


@dataclass(frozen=True)
class StageDecision:
    """`stages` are by name of a forward node; those that every stage computes for itself have none."""

    placement: StagePlacement
    stages: Mapping[str, int]

    def __str__(self) -> str:
        return str(self.placement)


@dataclass(frozen=True)
class PlaceStages:
    """Cut the forward into the stages of `order` so that the slowest one is as fast as can be on `cluster`, within `budget`.

    Where `held` says which stages hold the parameters already, the cuts are those that leave them there.

    Reads: PHASE, STRATEGY, SHARDING. Writes: STAGE of every call but those that each stage makes for itself.
    Ensures: activations flow to later stages, gradients to earlier ones.
    """

    order: PipelineSchedule
    cluster: Cluster
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    held: Held | None = None
    name: str = "place stages"

    def decide(self, program: Program) -> StageDecision:
        """Raises `PlanError` for more stages than there is work, and `MemoryBudgetError` when no placement fits."""
        cost = CostModel(self.cluster, program.mesh, self.budget.optimizer)
        found = line_of(program, cost)
        devices, live = self._devices(cost), live_microbatches(self.order)
        if self.held:
            placement = placed_at(found.line, devices, live, starts_where(found, program, self.held, self.order.num_stages))
        else:
            placement = place(found.line, devices, live)
        stages = found.forward_stages(placement.stage_of)
        return StageDecision(placement, {node.name: stage for node, stage in stages.items()})

    def apply(self, program: Program, decision: StageDecision) -> Program:
        program = program.copy()
        forward = {node: decision.stages[node.name] for node in program.graph.nodes if node.name in decision.stages}
        for node, stage in assign_stages(program, forward, self.order.num_stages).items():
            STAGE[node] = stage
        return program

    def _devices(self, cost: CostModel) -> Devices:
        """What stages run on; those of one rank share its memory."""
        latency, seconds_per_byte = cost.send()
        sharing = Counter(self.order.stages)
        speeds = tuple(self.cluster.speed(rank) for rank in self.order.stages)
        return Devices(speeds, tuple(self.budget.capacity_bytes / sharing[rank] for rank in self.order.stages), seconds_per_byte, latency)
