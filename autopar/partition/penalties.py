"""Removes the search's artificial penalty for mixing microbatches from the costs that are reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost.model import MIXING_SECONDS, is_mixing
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.reshard import moves, reachable
from autopar.ir.sharding import Sharding
from autopar.partition.sharding_problem import PriceClass, ShardingProblem
from autopar.partition.solver.assignment import Problem, State, ValueIndex
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import FoldedValue, fold
from autopar.partition.solver.search import NextCandidate, Solution


def without_penalties(solution: Solution, made: ShardingProblem) -> Solution:
    """`solution` at the seconds that its plan takes.

    The bound is lowered by as much: it then holds for all plans that mix no less.
    """
    problem = made.problem
    given = (state for node, pick in zip(problem.nodes, solution.picks, strict=True) for state in node.candidates[pick].results)
    if not any(isinstance(state, Sharding) and MICROBATCHES in state.axes for state in given):
        return solution
    paid = penalty_seconds(problem, solution.picks)
    if not paid:
        return solution
    return replace(solution, seconds=solution.seconds - paid, lower_bound_seconds=max(solution.lower_bound_seconds - paid, 0.0))


def penalty_seconds(problem: Problem, picks: Sequence[int]) -> float:
    """What mixing costs an assignment of all nodes."""
    penalties = Evaluation(_penalties(problem), fold(problem, None))
    return sum(value.count * penalties.conversion_seconds(value, picks) for value in penalties.folded.values)


def _penalties(problem: Problem) -> Problem:
    """The same problem, where a change of state costs the penalties in it."""

    def price(value: ValueIndex, source: State, target: State) -> float:
        assert isinstance(source, Sharding) and isinstance(target, Sharding)
        if not reachable(source, target):
            return math.inf
        found = problem.price_class(value)
        assert isinstance(found, PriceClass)
        return MIXING_SECONDS * sum(is_mixing(move, found.is_ahead) for move in moves(source, target))

    return replace(problem, price=price)


@dataclass(frozen=True)
class FairRunnersUp:
    """The runners-up of a search over several microbatches, but for those that would mix them: that is another computation."""

    solution: Solution

    @cached_property
    def _penalties(self) -> Evaluation:
        evaluation = self.solution.evaluation
        return Evaluation(_penalties(evaluation.problem), evaluation.folded)

    @cached_property
    def _touching(self) -> dict[int, list[FoldedValue]]:
        found: dict[int, list[FoldedValue]] = {}
        for value in self._penalties.folded.values:
            for number in {value.producer, *(reader for reader, _ in value.readers)}:
                found.setdefault(number, []).append(value)
        return found

    def of(self, index: int) -> NextCandidate | None:
        """As `Solution.runner_up`; None where every other candidate of node `index` mixes more."""
        found = self.solution.runner_up(index)
        if found is None:
            return None
        group = self.solution.contracted.group_of[index]
        number = self.solution.evaluation.folded.class_of[group]
        return found if self._added(number, self._position(index, group, number, found)) <= 0 else None

    def _position(self, index: int, group: int, number: int, found: NextCandidate) -> int:
        """The candidate of the contracted node that `found` is: views merged into it may be in several states."""
        kept, contracted, picks = self.solution.kept[group], self.solution.contracted, self.solution.class_picks
        allowed = [place for place, each in enumerate(kept) if contracted.pick_of(index, each) == found.pick]
        best = self.solution.evaluation.runner_up(number, picks, allowed)
        assert best is not None, found
        return best[0]

    def _added(self, number: int, position: int) -> float:
        picks = self.solution.class_picks
        changed = [position if each == number else pick for each, pick in enumerate(picks)]
        values = self._touching.get(number, ())
        return sum(
            value.count * (self._penalties.conversion_seconds(value, changed) - self._penalties.conversion_seconds(value, picks))
            for value in values
        )
