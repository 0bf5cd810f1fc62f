"""One strategy for every op and one sharding for every value, by cost."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch.fx import Node

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.errors import MemoryBudgetError, PlanError
from autopar.ir.keys import DIMS, DROPPED, REPEATABLE, SHARDING, STRATEGY
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, Sharding, Strategy, carried
from autopar.ops.strategies import strategies_of
from autopar.partition.conflicts import Situation, conflict
from autopar.partition.penalties import without_penalties
from autopar.partition.sharding_problem import ShardingProblem
from autopar.partition.solver.folding import ROUNDS
from autopar.partition.solver.search import Solution, search
from autopar.partition.zero_placements import require_in_parts
from autopar.plans.decisions import ShardingDecision
from autopar.plans.json import Json, PlanEntry
from autopar.plans.pins import resolve
from autopar.plans.plan import Pins, Plan

# A plan that is proved to be within this of the best is taken: prices are not that exact.
_TOLERANCE = 1e-6
# The same within a memory budget, where a plan that is exactly full is dear to find.
_TOLERANCE_IN_BUDGET = 5e-3


class KnownSharding(Protocol):
    """Where a parameter lies already: what an earlier capture fixed."""

    @property
    def dims(self) -> Dims: ...
    @property
    def sharding(self) -> Sharding: ...


@dataclass(frozen=True)
class ChooseShardings:
    """Choose the strategies that cost least together on `cluster`: work, memory traffic, collectives, held parameters.

    A `plan` that fits the program is taken as it is; of another plan, of `pins` and of `placements` (by parameter name)
    only the parameters are kept. What a rank holds stays within `budget`. `timeout` bounds the search in seconds; `fold`
    decides equal layers once.

    What the backward may compute again (REPEATABLE) takes either its bytes or the time of that, so that it is weighed against splitting
    parameters and values.

    Reads: DIMS, BATCH, PHASE, REPEATABLE. Writes: STRATEGY, SHARDING on all inputs and calls, DROPPED on what memory has no room for.
    Ensures: every node has a strategy that its rule allows, every gradient can leave in its parameter's sharding.
    """

    cluster: Cluster = field(default_factory=Cluster.ideal)
    plan: Plan | None = None
    pins: Pins | Plan | None = None
    placements: Mapping[str, KnownSharding] | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    timeout: float | None = None
    fold: bool = True
    name: str = "choose shardings"

    def decide(self, program: Program) -> ShardingDecision:
        """Raises `PlanError` when pins cannot be kept, and `MemoryBudgetError` when nothing fits."""
        pinned, reasons = self._pinned(program)
        # The stages of a pipeline share what the graph holds; each is held to the budget when they are placed.
        budget = self.budget.times(program.order.num_ranks)
        asked = Situation(program, CostModel(self.cluster, program.mesh), pinned, budget, reasons, program.order.num_ranks)
        made = asked.problem()
        try:
            solution = self._search(made)
        except MemoryBudgetError:
            raise conflict(asked, lambda other: self._search(other).seconds) from None
        strategies = {name: made.strategies[index][solution.picks[index]] for name, index in made.index.items()}
        for node in program.graph.nodes:
            if node.target is operator.getitem:
                strategies[node.name] = _getitem_strategy(node, strategies, program)
        mesh = program.mesh
        numbers = mesh.num_microbatches, mesh.size_of(mesh.parts("pp"))
        decision = ShardingDecision(strategies, reasons, solution, made, frozenset(pinned), *numbers, _dropped(program, made, solution))
        return replace(decision, reasons={**_reasons(program, decision), **reasons})

    def _search(self, made: ShardingProblem) -> Solution:
        tolerance = _TOLERANCE_IN_BUDGET if self.budget.capacity_bytes < math.inf else _TOLERANCE
        found = search(made.problem, rounds=ROUNDS if self.fold else None, timeout=self.timeout, tolerance=tolerance)
        return without_penalties(found, made)

    def apply(self, program: Program, decision: ShardingDecision) -> Program:
        program = program.copy()
        for node in program.graph.nodes:
            if node.op != "output":
                STRATEGY[node] = decision.strategies[node.name]
                SHARDING[node] = decision.strategies[node.name].results
            if node.name in decision.dropped:
                DROPPED[node] = True
        return program

    def written(self, program: Program, decision: ShardingDecision) -> dict[str, Json]:
        return Plan.of(self.apply(program, decision), decision).content()

    def read(self, program: Program, value: PlanEntry) -> ShardingDecision:
        """What the plan costs by this rank's own prices, and what else there was."""
        plan = Plan.of_content(value)
        return replace(replace(self, plan=plan, pins=None, placements=None).decide(program), reasons=plan.reasons)

    def _pinned(self, program: Program) -> tuple[dict[str, Strategy], dict[str, str]]:
        """Strategies fixed beforehand by node name, and why by parameter name or plan key."""
        inputs = {item.name: node for item, node in program.named_inputs() if item.kind == "parameter"}
        pinned: dict[str, Strategy] = {}
        reasons: dict[str, str] = {}
        if self.plan is not None:
            if self.plan.fits(program):
                pinned = {node.name: strategy for node, strategy in self.plan.strategies_on(program).items()}
                pinned = {name: strategy for name, strategy in pinned.items() if program.node(name).target is not operator.getitem}
            self._pin(self.plan.placements_on(program), "by the plan", inputs, pinned, reasons)
        by_user = dict[str, Sharding]()
        if self.pins:
            resolved = resolve(self.pins, program)
            by_user = resolved.plan.placements_on(program)
            self._pin(by_user, "pinned by the user", inputs, pinned, reasons)
            pinned |= resolved.outputs
        if self.placements:
            self._pin(_kept(self.placements, inputs, program.mesh), "as the first capture placed it", inputs, pinned, reasons)
        fixed = {name: pinned[inputs[name].name].results[0] for name in reasons}
        require_in_parts(program, fixed, reasons, set(self.placements or ()) - set(by_user))
        return pinned, reasons

    def _pin(
        self,
        shardings: Mapping[str, Sharding],
        why: str,
        inputs: Mapping[str, Node],
        pinned: dict[str, Strategy],
        reasons: dict[str, str],
    ) -> None:
        for name, sharding in shardings.items():
            pinned[inputs[name].name] = Strategy((), (sharding,))
            reasons[name] = why


def _kept(placements: Mapping[str, KnownSharding], inputs: Mapping[str, Node], mesh: Mesh) -> dict[str, Sharding]:
    """The shardings of earlier placements; raises `PlanError` for a parameter whose atoms are others now and cannot be split so."""
    found: dict[str, Sharding] = {}
    for name, placed in placements.items():
        if name not in inputs:
            continue
        dims = DIMS[inputs[name]][0]
        sharding = carried(placed.sharding, placed.dims, dims, mesh)
        if sharding is None:
            raise PlanError(
                f"{name!r} was placed as {placed.sharding.describe(placed.dims)} by the first capture; this call sees its dims as {dims}. "
                "Compile the model again for calls of this kind, or pin the parameter to be replicated."
            )
        found[name] = sharding
    return found


def _getitem_strategy(node: Node, strategies: Mapping[str, Strategy], program: Program) -> Strategy:
    """A getitem takes the result as it is."""
    producer, result = node.args
    assert isinstance(producer, Node) and isinstance(result, int)
    sharding = strategies[producer.name].results[result]
    return next(each for each in strategies_of(node, program.mesh, program.freedom) if each.operands == each.results == (sharding,))


def _dropped(program: Program, made: ShardingProblem, solution: Solution) -> frozenset[str]:
    """The `save` nodes that hold nothing, though they could."""
    picks = {node.name: solution.picks[made.index[node.name]] for node in program.graph.nodes if node in REPEATABLE}
    return frozenset(name for name, pick in picks.items() if 2 * pick >= len(made.strategies[made.index[name]]))


def _reasons(program: Program, decision: ShardingDecision) -> dict[str, str]:
    """For each parameter what the next-best sharding would cost."""
    found: dict[str, str] = {}
    for item, node in program.named_inputs():
        if item.kind != "parameter":
            continue
        other = decision.runner_up(node.name)
        if other is None:
            found[item.name] = "no other sharding is legal"
        else:
            described = other.strategy.results[0].describe(DIMS[node][0])
            alike = f" (all {other.num_nodes} alike)" if other.num_nodes > 1 else ""
            found[item.name] = f"next best {described}: {1e6 * other.extra_seconds:+.1f} µs {decision.per}{alike}"
    return found
