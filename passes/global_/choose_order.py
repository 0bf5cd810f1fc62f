"""In which order the stages of a pipeline run the microbatches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypedDict

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.ir.actions import PipelineSchedule, parse_action
from autopar.ir.program import Program
from autopar.pipeline.order import best_order
from autopar.plans.json import Json


class WrittenOrder(TypedDict):
    """A `PipelineSchedule` on its way to other ranks, its actions as they print."""

    name: str
    stages: list[int]
    num_microbatches: int
    orders: list[list[str]]


@dataclass(frozen=True)
class ChooseOrder:
    """With `is_free` find the order that takes the least time, every rank within `budget`; else keep the one that was asked for.

    Reads: STAGE, STRATEGY, SHARDING of a program with its reshards; its order, which says what rank holds which stage.
    Writes: the program's order. Ensures: it is within the budget where it was free, and has the stages and microbatches that it had.
    """

    is_free: bool
    cluster: Cluster
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    name: str = "choose order"

    def decide(self, program: Program) -> PipelineSchedule:
        """Raises `ScheduleError` where no order fits."""
        if not self.is_free or program.order.is_single:
            return program.order
        cost = CostModel(self.cluster, program.mesh, self.budget.optimizer)
        return best_order(program, cost, program.order, self.budget.capacity_bytes)

    def apply(self, program: Program, decision: PipelineSchedule) -> Program:
        return program if decision == program.order else replace(program, order=decision)

    def written(self, program: Program, decision: PipelineSchedule) -> dict[str, Json]:
        orders = [[str(action) for action in row] for row in decision.orders]
        return {"name": decision.name, "stages": decision.stages, "num_microbatches": decision.num_microbatches, "orders": orders}

    def read(self, program: Program, value: WrittenOrder) -> PipelineSchedule:
        orders = tuple(tuple(map(parse_action, row)) for row in value["orders"])
        return PipelineSchedule(value["name"], tuple(value["stages"]), value["num_microbatches"], orders)
