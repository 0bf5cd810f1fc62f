"""Why nothing fits into memory: which demands conflict, what needs how much at the least, and the ways out with their prices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import highspy
import numpy as np

from autopar.cost.memory import MemoryBudget, OptimizerKind
from autopar.cost.model import CostModel
from autopar.errors import MemoryBudgetError
from autopar.ir.freedom import Freedom
from autopar.ir.keys import REPEATABLE
from autopar.ir.markers import pinned
from autopar.ir.mesh import parent
from autopar.ir.pattern import pattern_of
from autopar.ir.program import Program
from autopar.ir.sharding import Strategy
from autopar.ir.units import in_bytes, in_seconds
from autopar.partition.sharding_problem import ShardingProblem

# Solves a problem: seconds a step of the best plan that fits. Raises `MemoryBudgetError` where none does.
Price = Callable[[ShardingProblem], float]
# A budget a little above the least, so that rounding does not decide.
_MARGIN = 1.001


@dataclass(frozen=True)
class Situation:
    """What was asked: the program, what is pinned (by node name, with the reasons by parameter name), and the budget, which is that of
    `num_ranks` together: the stages of a pipeline share what the program holds."""

    program: Program
    cost: CostModel
    pinned: Mapping[str, Strategy]
    budget: MemoryBudget
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    num_ranks: int = 1

    def problem(self) -> ShardingProblem:
        return ShardingProblem.of(self.program, self.cost, self.pinned, self.budget)

    def least_bytes(self) -> float:
        """No plan takes less, whatever is gathered or sent."""
        nodes = self.problem().problem.nodes
        held = sum(min(each.held_bytes for each in node.candidates) for node in nodes)
        return held + max(min(each.working_bytes for each in node.candidates) for node in nodes)

    def in_words(self, num_bytes: float) -> str:
        """A rank's part of what all hold together."""
        return in_bytes(num_bytes / self.num_ranks)


def conflict(situation: Situation, price: Price) -> MemoryBudgetError:
    """The error for a budget into which nothing fits."""
    again = ", where the backward computes layers again" if any(node in REPEATABLE for node in situation.program.graph.nodes) else ""
    limit = f"memory_budget={situation.in_words(situation.budget.asked_bytes)}"
    least = situation.least_bytes()
    each = f", where all {situation.num_ranks} stages need as much" if situation.num_ranks > 1 else ""
    lines = [f"no plan fits into {limit}: by the search's count a rank needs {situation.in_words(least)} at the least{again}{each}"]
    lines += [f"  {line}" for line in _parts(situation)]
    lines += ["what conflicts:", *(f"  {demand}" for demand in _conflicting(situation)), "ways out, and what a step then takes:"]
    ways = sorted(_ways_out(situation, price))
    lines += [f"  {in_seconds(seconds):>9}  {way}" for seconds, way in ways] or ["  none that keeps the mesh: use more ranks"]
    return MemoryBudgetError("\n".join(lines), least / situation.num_ranks)


def _parts(situation: Situation) -> Iterator[str]:
    """The least bytes of parameters with all that belongs to them, of what is saved, and of the widest op."""
    made = situation.problem()
    kinds = {node.name: item.kind for item, node in situation.program.named_inputs()}
    least: dict[str, float] = {}
    for node in made.problem.nodes:
        held = min(each.held_bytes for each in node.candidates)
        kind = {"parameter": "parameters", "buffer": "buffers"}.get(kinds.get(node.name, ""), "inputs")
        part = kind if node.name in kinds else "saved for the backward"
        least[part] = least.get(part, 0.0) + held
    widest = max(made.problem.nodes, key=lambda node: min(each.working_bytes for each in node.candidates))
    optimizer = situation.budget.optimizer
    for part, size in least.items():
        note = f", with gradients and {optimizer.num_copies} copies for {optimizer.name}" if part == "parameters" else ""
        if size:
            yield f"{situation.in_words(size):>10}  {part}{note}"
    working = min(each.working_bytes for each in widest.candidates)
    yield f"{situation.in_words(working):>10}  operands and results of {widest.name}, while it runs"


def _conflicting(situation: Situation) -> list[str]:
    """The demands of an irreducible infeasible subsystem: drop any one of them, and the others can be met (HiGHS's IIS)."""
    free = replace(situation, pinned={}).problem()
    rows = _Rows(situation.budget.capacity_bytes)
    names = {node.name: item.name for item, node in situation.program.named_inputs() if item.kind == "parameter"}
    for node, strategies in zip(free.problem.nodes, free.strategies, strict=True):
        held = [each.held_bytes for each in node.candidates]
        if not any(held):
            continue
        pinned = situation.pinned.get(node.name)
        if pinned is not None and pinned not in strategies:
            held.append(next(each.held_bytes for each in situation.problem().problem.nodes[free.index[node.name]].candidates))
            strategies = (*strategies, pinned)
        name = names.get(node.name, node.name)
        why = f"{pattern_of(name)} {situation.reasons.get(name, 'fixed')}"
        rows.add(held, strategies.index(pinned) if pinned is not None else None, why)
    working = max(min(each.working_bytes for each in node.candidates) for node in free.problem.nodes)
    return rows.irreducible(working, f"memory_budget={situation.in_words(situation.budget.capacity_bytes)}")


class _Rows:
    """Nodes as choices among held bytes, and pins, each a row that says which choice is taken; equal pins are one row."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._groups: dict[tuple[tuple[float, ...], int | None, str], int] = {}

    def add(self, held: list[float], pick: int | None, why: str) -> None:
        key = (tuple(held), pick, why if pick is not None else "")
        self._groups[key] = self._groups.get(key, 0) + 1

    def irreducible(self, working: float, budget: str) -> list[str]:
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        # The default only looks for rows that no values can meet one by one.
        solver.setOptionValue("iis_strategy", int(highspy.IisStrategy.kIisStrategyIrreducible.value))
        demands: dict[int, str] = {}
        columns: list[int] = []
        sizes: list[float] = []
        for (held, pick, why), count in self._groups.items():
            first = solver.getNumCol()
            for size in held:
                solver.addVar(0.0, 1.0)
                columns.append(solver.getNumCol() - 1)
                sizes.append(count * size / self._capacity)
            own = np.arange(first, first + len(held), dtype=np.int32)
            solver.addRow(1.0, 1.0, len(own), own, np.ones(len(own)))
            if pick is not None:
                demands[solver.getNumRow()] = why
                solver.addRow(1.0, 1.0, 1, own[pick : pick + 1], np.ones(1))
        demands[solver.getNumRow()] = budget
        solver.addRow(-highspy.kHighsInf, 1.0 - working / self._capacity, len(columns), np.array(columns, dtype=np.int32), np.array(sizes))
        solver.run()
        _, found = solver.getIis()
        named = [demands[row] for row in found.row_index_ if row in demands]
        return list(dict.fromkeys(named)) or [budget]


def _ways_out(situation: Situation, price: Price) -> Iterator[tuple[float, str]]:
    """Changes that let a plan fit, each by itself, with the seconds of a step."""
    for changed, way in _changes(situation):
        try:
            yield price(changed.problem()), way
        except MemoryBudgetError:
            continue


def _changes(situation: Situation) -> Iterator[tuple[Situation, str]]:
    program, budget = situation.program, situation.budget
    larger = replace(budget, capacity_bytes=_MARGIN * situation.least_bytes())
    yield replace(situation, budget=larger), f"memory_budget={situation.in_words(larger.capacity_bytes)}"
    by_user = {node.name for item, node in program.named_inputs() if "user" in situation.reasons.get(item.name, "")}
    by_user |= {node.name for node in program.graph.nodes if node.target is pinned and node.name in situation.pinned}
    if by_user:
        kept = {name: strategy for name, strategy in situation.pinned.items() if name not in by_user}
        yield replace(situation, pinned=kept), "drop the pins"
    sgd = OptimizerKind.of("sgd")
    if budget.optimizer.num_copies > sgd.num_copies:
        yield replace(situation, budget=replace(budget, optimizer=sgd)), 'optimizer="sgd": no state'
    freedom = program.freedom
    axes = tuple(dict.fromkeys(parent(axis) for axis in program.mesh.ranks.names))  # microbatches are none to split anything over
    batch = tuple(axis for axis in freedom.batch if axis in axes)
    if batch and not freedom.shards_parameters:
        parts = program.copy(freedom=replace(freedom, shards_parameters=True))
        yield replace(situation, program=parts), f"let {', '.join(batch)} split parameters (fully sharded)"
    unused = tuple(axis for axis in axes if axis not in (*freedom.batch, *freedom.flexible, "pp"))
    if unused:
        open_batch = Freedom(freedom.batch, (*freedom.flexible, *unused), True)
        yield (
            replace(situation, program=program.copy(freedom=open_batch)),
            f'pins={{"batch": {[*batch, *freedom.flexible, *unused]}}}: the batch over these axes, too',
        )
