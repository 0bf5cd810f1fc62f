"""Gathers and scatters over several nodes go between nodes and within them, one after the other, where that is quicker.

LAUNCH all_gather copy dp (w) -> w_1                a ring over 256 ranks: 255 steps
LAUNCH all_gather copy dp by 8 (w) -> w_1           one over 32 nodes, and one over the 8 ranks of each: 38 steps, as many bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.cost.schedule_budget import ScheduleBudget
from autopar.ir.instructions import Launch
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_seconds
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.decisions import NodeSizes


@dataclass(frozen=True)
class GoByNode:
    """Let an all-gather or a reduce-scatter go by node where the price of its bytes is less so.

    A ring takes a step for each rank, and what starts them is most of the time of a small message on many nodes. All-reduces go as one:
    libraries add up in switches, and along trees between nodes.

    Reads: a `ScheduleProgram` in its final order, without FREEs. Writes: how LAUNCHes go. Ensures: the same values, but for the order in
    which a sum is added up; what fits into the budget still does.
    """

    cluster: Cluster
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    name: str = "go by node"

    def decide(self, program: ScheduleProgram) -> NodeSizes:
        cost = CostModel(self.cluster, program.mesh)
        found: dict[str, int] = {}
        for schedule in program.places:
            for each in schedule.instructions:
                if isinstance(each, Launch) and (size := _node_size(schedule, each, cost)):
                    found[each.name] = size
        if not found:
            return NodeSizes()
        wanted = NodeSizes(found, _reason(program, found, cost))
        if not ScheduleBudget(program.places, self.budget).allows(self.apply(program, wanted).places):
            return NodeSizes({}, f"as one: {len(found)} collectives would be quicker by node, which does not fit into the budget")
        return wanted

    def apply(self, program: ScheduleProgram, decision: NodeSizes) -> ScheduleProgram:
        if not decision.sizes:
            return program
        return program.with_places([_with_sizes(schedule, decision.sizes) for schedule in program.places])

    def written(self, program: ScheduleProgram, decision: NodeSizes) -> dict[str, int]:
        return dict(decision.sizes)

    def read(self, program: ScheduleProgram, value: Mapping[str, int]) -> NodeSizes:
        return NodeSizes(dict(value))


def _node_size(schedule: Schedule, launch: Launch, cost: CostModel) -> int:
    if MICROBATCHES in launch.axes or launch.collective not in ("all_gather", "reduce_scatter"):
        return 0
    return cost.node_size(launch.collective, launch.axes, *_sizes(schedule, launch))


def _sizes(schedule: Schedule, launch: Launch) -> tuple[float, float]:
    """Bytes of what a rank gives, and of what it gets."""
    given, left = (float(sum(map(schedule.bytes_of, names))) for names in (launch.sources, launch.targets))
    return given, left


def _with_sizes(schedule: Schedule, sizes: Mapping[str, int]) -> Schedule:
    groups = [
        (replace(each, node_size=sizes[each.name]),) if isinstance(each, Launch) and each.name in sizes else (each,)
        for each in schedule.instructions
    ]
    return schedule.regrouped(groups)


def _reason(program: ScheduleProgram, found: Mapping[str, int], cost: CostModel) -> str:
    """What they take of the busiest stage's step, as one and by node."""
    most, saying = 0.0, ""
    for schedule in program.places:
        launches = [each for each in schedule.instructions if isinstance(each, Launch) and each.name in found]
        as_one = sum(cost.collective(each.collective, each.axes, *_sizes(schedule, each)).seconds for each in launches)
        by_node = sum(cost.by_node(each.collective, each.axes, *_sizes(schedule, each)) for each in launches)
        if as_one > most:
            most = as_one
            saying = f"{len(launches)} by node take {in_seconds(by_node)} on the wire, {in_seconds(as_one)} as one"
    return saying
