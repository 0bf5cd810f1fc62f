"""Finds the cheapest assignment, proves how cheap it could be at best, and says what was left out and why.

    contract    views go to their neighbours                                            autopar.partition.solver.contraction
    fold        equal layers are decided once                                           autopar.partition.solver.folding
    dominated   of candidates with equal states, those that are no better in anything go
    search      a lower bound and an assignment that meet                               autopar.partition.solver.bound_search

The linear relaxation is nearly always integral: the search then ends at an assignment that costs what the bound says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.errors import MemoryBudgetError, PlanError
from autopar.partition.solver.assignment import Candidate, Problem, without_dominated
from autopar.partition.solver.bound_search import BoundSearch
from autopar.partition.solver.contraction import Contracted, contract
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import ROUNDS, fold
from autopar.partition.solver.tables import IS_NO_WAY


@dataclass(frozen=True)
class Solution:
    """`picks[i]` is the position of the candidate taken for node i; seconds are the problem's own, `search_seconds` the clock's.

    `class_picks` are positions among the candidates `kept` of each node of the contracted problem, one for each class.
    `num_bytes` is what the assignment takes of the capacity; `seconds_per_byte` what a byte more of it would save.
    """

    picks: tuple[int, ...]
    class_picks: tuple[int, ...]
    contracted: Contracted
    kept: tuple[tuple[int, ...], ...]
    evaluation: Evaluation
    seconds: float
    lower_bound_seconds: float
    search_seconds: float
    num_bytes: float
    seconds_per_byte: float
    num_variables: int
    num_dominated: int
    num_bounded: int
    is_timed_out: bool
    _runners_up: dict[tuple[int, tuple[int, ...]], tuple[int, float] | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def gap(self) -> float:
        """How much dearer than the bound the assignment may be: 0.01 is one per cent."""
        return max(0.0, self.seconds / self.lower_bound_seconds - 1.0) if self.lower_bound_seconds > 0 else math.inf

    @property
    def num_classes(self) -> int:
        return len(self.evaluation.folded.sizes)

    def runner_up(self, index: int) -> NextCandidate | None:
        """The next-best candidate of node `index` and its like, everything else as it is; None where there is no other."""
        return self.cheapest(index, lambda pick: True)

    def cheapest(self, index: int, is_wanted: Callable[[int], bool]) -> NextCandidate | None:
        """As `runner_up`, among the candidates of the node that are wanted, by their positions."""
        group = self.contracted.group_of[index]
        number = self.evaluation.folded.class_of[group]
        others = [self.contracted.pick_of(index, position) for position in self.kept[group]]
        allowed = tuple(position for position, pick in enumerate(others) if pick != self.picks[index] and is_wanted(pick))
        if (number, allowed) not in self._runners_up:
            self._runners_up[number, allowed] = self.evaluation.runner_up(number, self.class_picks, allowed)
        found = self._runners_up[number, allowed]
        return found and NextCandidate(others[found[0]], found[1], self.evaluation.folded.sizes[number])


@dataclass(frozen=True)
class NextCandidate:
    """A candidate's position, and the seconds it adds when all `num_nodes` nodes of the class take it."""

    pick: int
    extra_seconds: float
    num_nodes: int


def search(problem: Problem, *, rounds: int | None = ROUNDS, timeout: float | None = None, tolerance: float = 1e-7) -> Solution:
    """The cheapest assignment within `tolerance` (relative), or the best one found within `timeout` seconds.

    Deterministic unless the time runs out. Raises `MemoryBudgetError` when none fits into the capacity,
    `PlanError` when none is possible at all, or none was found in time.
    """
    start = time.perf_counter()
    contracted, kept, evaluation = reduced(problem, rounds)
    bounds = BoundSearch(evaluation, math.inf if timeout is None else start + timeout, tolerance)
    bounds.run()
    if bounds.picks is None and bounds.mixture is None:
        raise _nothing_found(bounds, timeout)
    found, class_picks = evaluation, bounds.picks
    if bounds.mixture is not None and bounds.mixture.seconds <= bounds.upper:
        found, class_picks = bounds.mixture.evaluation, bounds.mixture.picks
    assert class_picks is not None
    chosen = [positions[pick] for positions, pick in zip(kept, found.folded.unfold(class_picks), strict=True)]
    return Solution(
        picks=tuple(contracted.original(chosen)),
        class_picks=tuple(class_picks),
        contracted=contracted,
        kept=tuple(tuple(positions) for positions in kept),
        evaluation=found,
        seconds=bounds.seconds,
        lower_bound_seconds=min(bounds.lower, bounds.seconds),
        search_seconds=time.perf_counter() - start,
        num_bytes=found.num_bytes(class_picks),
        seconds_per_byte=bounds.byte_price,
        num_variables=sum(len(node.candidates) for node in evaluation.nodes),
        num_dominated=sum(len(node.candidates) - len(positions) for node, positions in zip(contracted.problem.nodes, kept, strict=True)),
        num_bounded=bounds.num_bounded,
        is_timed_out=time.perf_counter() > bounds.deadline,
    )


def reduced(problem: Problem, rounds: int | None = ROUNDS) -> tuple[Contracted, list[list[int]], Evaluation]:
    """What is left to solve: `problem` contracted, by node the positions of the candidates kept, and the problem folded."""
    contracted = contract(problem)
    smaller, kept = _without_dominated(contracted.problem)
    return contracted, kept, Evaluation(smaller, fold(smaller, rounds))


def _without_dominated(problem: Problem) -> tuple[Problem, list[list[int]]]:
    """The problem without its dominated candidates, and the positions kept of each node; once for nodes that share their candidates."""
    known: dict[int, tuple[list[int], tuple[Candidate, ...]]] = {}
    for node in problem.nodes:
        if id(node.candidates) not in known:
            positions = without_dominated(node.candidates)
            known[id(node.candidates)] = positions, tuple(node.candidates[position] for position in positions)
    found = [known[id(node.candidates)] for node in problem.nodes]
    nodes = tuple(replace(node, candidates=candidates) for node, (_, candidates) in zip(problem.nodes, found, strict=True))
    return replace(problem, nodes=nodes), [positions for positions, _ in found]


def _nothing_found(bounds: BoundSearch, timeout: float | None) -> PlanError:
    if bounds.lower > IS_NO_WAY:
        return PlanError("no assignment is possible: some value is needed in a sharding that it cannot be brought to")
    if bounds.is_infeasible:
        return MemoryBudgetError("no assignment fits into memory")
    return PlanError(f"no plan found within search_timeout={timeout}; give it more seconds")
