"""Communication hides behind compute: collectives start earlier and are waited for later, as far as that pays and memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.cost.schedule_budget import ScheduleBudget
from autopar.ir.instructions import Copy, Launch, Run, Send
from autopar.ir.mesh import Mesh
from autopar.ir.units import in_seconds
from autopar.pipeline.exposure import Exposure, predicted_exposure
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.in_turns import in_turns
from autopar.pipeline.overlap import Haste, ListSchedule, reordered
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import LinkOf, Seconds, simulate

# What is tried, what takes less memory first; `ahead_bytes` in units of the largest gather: the next layer's parameters, or those of a few.
HASTES = tuple(Haste(1.0, ahead, postpones) for postpones in (False, True) for ahead in (4, 16))
# A gain below this share of a step is less than what the clock does not know.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Overlap:
    """The order of the instructions at each place along `pp`, as numbers of those that are there; None: as they are.

    `before` and `after` are a step on paper, `reason` why nothing is moved.
    """

    orders: tuple[tuple[int, ...], ...] | None
    before: Exposure | None = None
    after: Exposure | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return self.reason
        seconds = f"{in_seconds(self.before.step_seconds)} → {in_seconds(self.after.step_seconds)}"
        return f"exposed {self.before.exposed_share:.1%} → {self.after.exposed_share:.1%} of a step, {seconds}"


@dataclass(frozen=True)
class OverlapCommunication:
    """List-schedule what every rank executes (`autopar.pipeline.overlap`), and keep the order with the shortest step on paper.

    Without a pipeline that is also tried with microbatches that take turns (`autopar.pipeline.in_turns`). One collective goes over a link
    at a time, those of all mesh axes that use it. What is computed, and in which order sums are added up, stays as it is. All ranks at a
    place along `pp` run one schedule, so that each group has one order of its collectives.

    With `keeps_actions`, where weights are updated between the actions of a rank, a rank without a pipeline keeps its order: what one
    microbatch computes must not pass the update that the one before it makes.

    Reads: a `ScheduleProgram` without FREEs. Writes: the order of its instructions. Ensures: within the budget, or as before; a step is
    not longer on paper.
    """

    cluster: Cluster
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    keeps_actions: bool = False
    name: str = "overlap communication"

    def decide(self, program: ScheduleProgram) -> Overlap:
        if self.keeps_actions and len(program.places) == 1:
            return Overlap(None, reason="weights are updated between microbatches")
        launches = [each for schedule in program.places for each in schedule.instructions if isinstance(each, Launch)]
        cost = CostModel(self.cluster, program.mesh)
        if all(cost.collective("all_gather", each.axes, 0, 0).seconds <= 0 for each in launches):
            return Overlap(None, reason="nothing to hide: links cost nothing here")
        seconds, links = fragment_seconds(program, cost), links_of(self.cluster, program.mesh)
        before = predicted_exposure(program, simulate(program, seconds, links, has_memory=False))
        if not before.exposed_seconds > LEAST_GAIN * before.step_seconds:
            return Overlap(None, reason=f"nothing to hide: {before}")
        best: tuple[float, Overlap] = ((1 - LEAST_GAIN) * before.step_seconds, Overlap(None, reason=f"no order is better: {before}"))
        budget = ScheduleBudget(program.places, self.budget)
        for orders in self._candidates(program, seconds, links):
            tried = ordered(program, orders)
            after = predicted_exposure(tried, simulate(tried, seconds, links, has_memory=False))
            # What is tried first takes less memory.
            if after.step_seconds < (1 - LEAST_GAIN / 2) * best[0] and budget.allows(tried.places):
                best = after.step_seconds, Overlap(orders, before, after)
        return best[1]

    def apply(self, program: ScheduleProgram, decision: Overlap) -> ScheduleProgram:
        return program if decision.orders is None else ordered(program, decision.orders)

    def written(self, program: ScheduleProgram, decision: Overlap) -> list[list[int]] | None:
        return None if decision.orders is None else [list(each) for each in decision.orders]

    def read(self, program: ScheduleProgram, value: Sequence[Sequence[int]] | None) -> Overlap:
        return Overlap(None if value is None else tuple(map(tuple, value)))

    def _candidates(self, program: ScheduleProgram, seconds: Seconds, links: LinkOf) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Orders for all places, those that take less memory first."""
        yield from _listed(program, seconds, links)
        if len(program.places) != 1:
            return
        turns = in_turns(program.places[0], seconds, links)
        if turns != tuple(range(len(turns))):
            for (order,) in _listed(ordered(program, [turns]), seconds, links):
                # `order` numbers what stands in turns.
                yield (tuple(turns[number] for number in order),)


def _listed(program: ScheduleProgram, seconds: Seconds, links: LinkOf) -> Iterator[tuple[tuple[int, ...], ...]]:
    """List schedules of all places."""

    def unhindered(each: Run | Send | Launch | Copy) -> float:
        return 0.0 if isinstance(each, Launch) else seconds(each)

    clock = simulate(program, unhindered, has_memory=False).instruction_seconds
    rows = [ListSchedule(schedule, seconds, ends, links) for schedule, ends in zip(program.places, clock, strict=True)]
    for haste in HASTES:
        here = replace(haste, ahead_bytes=haste.ahead_bytes * _largest(program))
        yield tuple(row.order(here) for row in rows)


def _largest(program: ScheduleProgram) -> int:
    """Bytes of the largest result of a gather."""
    gathers = [
        each for each in program.places for each in each.instructions if isinstance(each, Launch) and each.collective == "all_gather"
    ]
    return max((sum(map(program.places[0].bytes_of, each.targets)) for each in gathers), default=0)


def links_of(cluster: Cluster, mesh: Mesh) -> LinkOf:
    """By the axes of a group the link that it takes: all within nodes share one, all between nodes another."""

    @cache
    def link(axes: tuple[str, ...]) -> str:
        return "between nodes" if cluster.route(mesh, axes).num_nodes > 1 else "within nodes"

    return link


def ordered(program: ScheduleProgram, orders: Sequence[Sequence[int]]) -> ScheduleProgram:
    """`program` with the instructions at each place in another order."""
    return program.with_places([reordered(schedule, order) for schedule, order in zip(program.places, orders, strict=True)])
