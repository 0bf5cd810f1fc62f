"""`schedule="auto"`: the schedule that the prices ask for, under a memory budget per rank, uneven stages included.

Candidates are the schedules drawn by hand that fit the placement, and list scheduling under many policies: first a grid of
them, then changes of the best one at random (with a fixed seed: equal prices give equal schedules on all ranks). The best is
the one with the shortest longest span, or the shortest step. The idea of a greedy pass with a few settings to try is that of
arXiv:2401.10241, section 3.1; settings per rank and the search over them are ours.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

from autopar.errors import ScheduleError
from autopar.ir.actions import Action, PipelineSchedule
from autopar.pipeline.cost import PipelineCost, grid_memory
from autopar.pipeline.expand import expand
from autopar.pipeline.list_schedule import Listed, Objective, OrderingProblem, Policy, list_schedule, natural_ahead
from autopar.pipeline.schedules import GENERATORS, generate
from autopar.pipeline.shift_weights import shift_weights
from autopar.pipeline.simulate import simulate

_Value = TypeVar("_Value")
# Actions that the search may place in all: a few seconds.
_EFFORT = 300_000
_MIN_TRIALS = 48
_ROUNDS = 8


@dataclass(frozen=True)
class _Candidate:
    schedule: PipelineSchedule
    # What is minimised, the most important first.
    score: tuple[float, ...]


def auto_schedule(
    cost: PipelineCost,
    num_microbatches: int,
    stages: Sequence[int] | None = None,
    budget_bytes: float | Sequence[float] = math.inf,
    objective: Objective = "span",
    effort: int = _EFFORT,
) -> PipelineSchedule:
    """The best schedule found for stages at these prices, on the ranks `stages` (by default one stage a rank).

    `objective`: "span" is what a step takes where steps follow each other without a barrier, "step" what it takes on its own.
    Raises `ScheduleError` where no schedule keeps every rank within `budget_bytes`.
    """
    placement = tuple(range(len(cost.stages))) if stages is None else tuple(stages)
    if len(placement) != len(cost.stages) or num_microbatches < 1:
        given = f"{len(placement)} stages placed, {len(cost.stages)} priced, {num_microbatches} microbatches"
        raise ScheduleError(f"a schedule wants a rank for each stage and one or more microbatches: {given}")
    num_ranks = max(placement) + 1
    budgets = tuple(budget_bytes) if isinstance(budget_bytes, Sequence) else (budget_bytes,) * num_ranks
    if len(budgets) != num_ranks:
        raise ScheduleError(f"{len(budgets)} budgets for {num_ranks} ranks: give one number, or one for each rank")
    search = _Search(cost, num_microbatches, placement, budgets, objective, effort)
    return search.best().schedule


@dataclass(frozen=True)
class _Search:
    cost: PipelineCost
    num_microbatches: int
    stages: tuple[int, ...]
    budgets: tuple[float, ...]
    objective: Objective
    effort: int

    @property
    def num_actions(self) -> int:
        return 3 * self.num_microbatches * len(self.stages)

    def best(self) -> _Candidate:
        candidates = [each for schedule in self.drawn() if (each := self.judge(schedule))]
        candidates += self.listed()
        if not candidates:
            self.refuse()
        return min(candidates, key=lambda each: each.score)

    def drawn(self) -> Iterator[PipelineSchedule]:
        """Schedules drawn by hand that place the stages like this."""
        num_ranks = len(self.budgets)
        for name in GENERATORS:
            if name == "gpipe":
                continue  # 1F1B takes as long and holds less.
            schedule = generate(name, num_ranks, self.num_microbatches, max(len(self.stages) // num_ranks, 1))
            if schedule.stages == self.stages:
                yield replace(schedule, name="auto")

    def listed(self) -> list[_Candidate]:
        """What list scheduling finds. It counts saved values only: where buffers come on top, it tries again with less room."""
        room = [budget - self.fixed_bytes(rank) for rank, budget in enumerate(self.budgets)]
        num_shifts = self.effort // (10 * self.num_actions)
        for rounds_left in reversed(range(_ROUNDS)):
            problem = OrderingProblem(self.cost, self.stages, self.num_microbatches, tuple(room))
            found = self.policies(problem)
            if found is None:
                return []
            orders = shift_weights(problem, found.orders, num_shifts, self.objective)
            schedule = PipelineSchedule("auto", self.stages, self.num_microbatches, orders)
            variants = [each for orders in _merged(schedule, self.cost) if (each := self.judge(replace(schedule, orders=orders)))]
            if variants:
                return variants
            memory = grid_memory(expand(schedule, tuple(self.cost.edges)), self.cost)
            for rank, budget in enumerate(self.budgets):
                over = memory[rank].peak_bytes - budget
                if over > 0:
                    least = sum(self.cost.stages[stage].saved_bytes for stage in problem.stages_of(rank))
                    room[rank] = max(least, problem.peak_saved_bytes(orders[rank]) - over) if rounds_left > 1 else least
        return []

    def fixed_bytes(self, rank: int) -> float:
        stages = [self.cost.stages[stage] for stage, holder in enumerate(self.stages) if holder == rank]
        return sum(stage.held_bytes for stage in stages) + max((stage.working_bytes for stage in stages), default=0.0)

    def judge(self, schedule: PipelineSchedule) -> _Candidate | None:
        """Its score; None where a rank holds more than its budget."""
        simulation = simulate(schedule, self.cost)
        if any(peak > budget * (1 + 1e-9) for peak, budget in zip(simulation.peak_bytes, self.budgets, strict=True)):
            return None
        score = self.score(simulation.span_seconds, simulation.step_seconds)
        return _Candidate(schedule, (*score, sum(map(len, schedule.orders))))

    def score(self, spans: Sequence[float], step: float) -> tuple[float, ...]:
        span = max(spans)
        # Rounded, so that equal schedules tie and the next criterion decides.
        return tuple(float(f"{each:.9e}") for each in ((span, step) if self.objective == "span" else (step, span)))

    def policies(self, problem: OrderingProblem) -> Listed | None:
        """The best of the grid, then of random changes to it."""
        num_trials = max(self.effort // self.num_actions, _MIN_TRIALS)
        bound = self.bound()
        ideas = _Ideas(problem)
        best: tuple[tuple[float, ...], Policy, Listed] | None = None
        grid = ideas.grid()
        for _ in range(num_trials):
            policy = next(grid, None) or (ideas.change(best[1]) if best else None)
            if policy is None:
                break
            listed = list_schedule(problem, policy)
            if listed is None:
                continue
            # The spans' sum leads on where the longest is on a plateau.
            score = (*self.score(listed.span_seconds, listed.step_seconds), sum(listed.span_seconds))
            if best is None or score <= best[0]:
                best = (score, policy, listed)
            if best[0][0] <= bound * (1 + 1e-6):
                break
        return best[2] if best else None

    def bound(self) -> float:
        """Nothing is shorter: the work of the busiest rank."""
        work = [0.0] * len(self.budgets)
        for stage, rank in zip(self.cost.stages, self.stages, strict=True):
            work[rank] += self.num_microbatches * sum(stage.seconds(kind) for kind in "FIW")
        return max(work)

    def refuse(self) -> NoReturn:
        lines: list[str] = []
        for rank, budget in enumerate(self.budgets):
            stages = [self.cost.stages[stage] for stage, holder in enumerate(self.stages) if holder == rank]
            needed = self.fixed_bytes(rank) + sum(stage.saved_bytes for stage in stages)
            lines.append(f"rank {rank} has {budget:.6g} bytes and needs {needed:.6g} for one microbatch, buffers aside")
        lines.append("give it more, make microbatches smaller, recompute, or cut more stages")
        raise ScheduleError("\n".join(["no schedule keeps every rank within its budget:", *lines]))


class _Ideas:
    """Policies to try."""

    def __init__(self, problem: OrderingProblem) -> None:
        self.random = random.Random(0)
        self.ahead = natural_ahead(problem)
        self.most = problem.num_microbatches * len(problem.stages)
        stages = problem.cost.stages
        self.forward = sum(stage.seconds("F") for stage in stages) / len(stages)
        self.weight = sum(stage.seconds("W") for stage in stages) / len(stages)

    def grid(self) -> Iterator[Policy]:
        num_ranks = len(self.ahead)
        idleness = [share * self.forward for share in (0.25, 0.5, 2.0, 0.0)] + [math.inf]
        for more, patience, seconds in itertools.product((1, 0, 2), (0.0, 1.0, 0.5), idleness):
            ahead = tuple(min(each + more, self.most) for each in self.ahead)
            yield Policy(ahead, (patience * self.forward,) * num_ranks, (0.0,) * num_ranks, (seconds,) * num_ranks)

    def change(self, policy: Policy) -> Policy:
        """One or two settings of `policy` changed, of one rank or of all."""
        for _ in range(self.random.choice((1, 1, 2))):
            ranks = range(len(self.ahead))
            policy = self._change(policy, ranks if self.random.random() < 0.4 else [self.random.choice(ranks)])
        return policy

    def _change(self, policy: Policy, ranks: Sequence[int]) -> Policy:
        what = self.random.choice(("ahead", "forward", "weight", "idleness"))
        if what == "ahead":
            more = self.random.choice((-1, 0, 1, 1, 2))
            return replace(policy, ahead=_with(policy.ahead, {rank: max(1, self.ahead[rank] + more) for rank in ranks}))
        if what == "forward":
            seconds = self.random.choice((0.0, 0.5, 1.0)) * self.forward
            return replace(policy, forward_patience_seconds=_with(policy.forward_patience_seconds, dict.fromkeys(ranks, seconds)))
        if what == "weight":
            seconds = self.random.choice((0.0, 0.0, 0.25, 0.5)) * self.weight
            return replace(policy, weight_patience_seconds=_with(policy.weight_patience_seconds, dict.fromkeys(ranks, seconds)))
        seconds = self.random.uniform(0.0, 4.0) * self.forward
        return replace(policy, idleness_seconds=_with(policy.idleness_seconds, dict.fromkeys(ranks, seconds)))


def _with(values: tuple[_Value, ...], changes: Mapping[int, _Value]) -> tuple[_Value, ...]:
    return tuple(changes.get(index, value) for index, value in enumerate(values))


def _merged(schedule: PipelineSchedule, cost: PipelineCost) -> Iterator[tuple[tuple[Action, ...], ...]]:
    """The orders with I and W that follow each other as one B: where nobody waits for I, and everywhere where that may save time."""
    savings = [stage.seconds("I") + stage.seconds("W") - stage.seconds("B") for stage in cost.stages]
    awaited = {edge.target for edge in cost.edges if edge.has_gradient}
    useful = {stage for stage, saving in enumerate(savings) if saving >= 0}
    yield tuple(_merge(order, useful - awaited) for order in schedule.orders)
    if max(savings) > 0:
        yield tuple(_merge(order, useful) for order in schedule.orders)


def _merge(order: Sequence[Action], stages: set[int]) -> tuple[Action, ...]:
    merged: list[Action] = []
    for action in order:
        before = merged[-1] if merged else None
        if action.kind == "W" and action.stage in stages and before == action._replace(kind="I"):
            merged[-1] = action._replace(kind="B")
        else:
            merged.append(action)
    return tuple(merged)
