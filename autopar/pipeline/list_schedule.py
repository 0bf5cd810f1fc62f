"""One pass of list scheduling: given prices, memory and a policy, the order in which each rank runs its actions.

Ranks decide in the order of time. A free rank takes the input gradient (I) that is there, for the rank before waits for it; else a
forward, while memory and the policy's limit allow; else a weight gradient (W), which nobody waits for and which
therefore fills gaps. Three things it must weigh, and the policy says how:

    ahead       how many forwards a rank may be ahead of its input gradients: too few starve the ranks behind, too many
                hold memory and keep gradients waiting
    patience    an I is on its way: how late may a forward, or a W, started now make it?
    idleness    seconds that a rank may idle in all for the sake of such patience; after that it takes what there is

No rank gets stuck for memory: a forward starts only where one microbatch still fits through each later stage of the rank.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.ir.actions import Action, Kind
from autopar.pipeline.cost import PipelineCost

# What is to be short: the longest span of a rank, or the whole step.
Objective = Literal["span", "step"]
_TINY = 1e-9


@dataclass(frozen=True)
class Policy:
    """Seconds, except `ahead`: (stage, microbatch) pairs. One entry per rank."""

    ahead: tuple[int, ...]
    forward_patience_seconds: tuple[float, ...]
    weight_patience_seconds: tuple[float, ...]
    idleness_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Listed:
    """Orders and what they give: seconds of each rank from first start to last end, and of the whole step."""

    orders: tuple[tuple[Action, ...], ...]
    span_seconds: tuple[float, ...]
    step_seconds: float


@dataclass(frozen=True)
class OrderingProblem:
    """What is to be ordered: stages on ranks, microbatches, prices, and bytes for saved values per rank (inf: no limit)."""

    cost: PipelineCost
    stages: tuple[int, ...]
    num_microbatches: int
    saved_bytes_limit: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.saved_bytes_limit)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.stages) if holder == rank]

    def peak_saved_bytes(self, order: Sequence[Action]) -> float:
        """The most that a rank's saved values take at a time when it runs `order`."""
        saved = peak = 0.0
        for action in order:
            stage = self.cost.stages[action.stage]
            saved += stage.saved_bytes if action.kind == "F" else 0.0
            peak = max(peak, saved)
            saved -= stage.freed_bytes(action.kind)
        return peak

    def communication_seconds(self, source: int, target: int, seconds: float) -> float:
        return seconds if self.stages[source] != self.stages[target] else 0.0


def list_schedule(problem: OrderingProblem, policy: Policy) -> Listed | None:
    """The schedule that `policy` leads to; None where some rank's memory holds not even one microbatch."""
    return _Builder(problem, policy).build()


class _Builder:
    def __init__(self, problem: OrderingProblem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        stages, num_ranks = problem.cost.stages, problem.num_ranks
        self.seconds = [{kind: stage.seconds(kind) for kind in "FIW"} for stage in stages]
        # To whom the end of a stage's F, or of its I, is news, and how long it takes to get there.
        self.forward_to: list[list[tuple[int, float]]] = [[] for _ in stages]
        self.backward_to: list[list[tuple[int, float]]] = [[] for _ in stages]
        num_forward, num_backward = [0] * len(stages), [1] * len(stages)
        for edge, price in problem.cost.edges.items():
            delay = problem.communication_seconds(edge.source, edge.target, price.seconds)
            self.forward_to[edge.source].append((edge.target, delay))
            num_forward[edge.target] += 1
            if edge.has_gradient:
                self.backward_to[edge.target].append((edge.source, delay))
                num_backward[edge.source] += 1
        each = range(problem.num_microbatches)
        # For each stage and microbatch: inputs of F and of I that are not on their way yet, and when the last of the others arrives.
        self.missing = {"F": [[count for _ in each] for count in num_forward], "I": [[count for _ in each] for count in num_backward]}
        self.arrival = {kind: [[0.0 for _ in each] for _ in stages] for kind in "FI"}
        # How many of each kind a stage has started: microbatches go in order.
        self.count = {kind: [0] * len(stages) for kind in "FIW"}
        self.of_rank = [sorted(problem.stages_of(rank), reverse=True) for rank in range(num_ranks)]
        self.reserve = self._reserves()
        self.free = [0.0] * num_ranks
        self.first = [math.inf] * num_ranks
        self.idle = [0.0] * num_ranks
        self.saved = [0.0] * num_ranks
        self.ahead = [0] * num_ranks
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.turns: list[tuple[float, int]] = [(0.0, rank) for rank in range(num_ranks)]

    def _reserves(self) -> dict[int, float]:
        """For each stage, what one microbatch through the rank's later stages takes."""
        reserves: dict[int, float] = {}
        for stages in self.of_rank:
            total = 0.0
            for stage in stages:
                reserves[stage] = total
                total += self.problem.cost.stages[stage].saved_bytes
        return reserves

    def build(self) -> Listed | None:
        while self.turns:
            now, rank = heapq.heappop(self.turns)
            if now >= self.free[rank]:
                self.turn(now, rank)
        wanted = 3 * self.problem.num_microbatches * len(self.problem.stages)
        if sum(map(len, self.orders)) < wanted:
            return None
        spans = tuple(end - begin if order else 0.0 for end, begin, order in zip(self.free, self.first, self.orders, strict=True))
        return Listed(tuple(map(tuple, self.orders)), spans, max(self.free))

    def turn(self, now: float, rank: int) -> None:
        """Let a free rank start something, or look again when the next thing arrives."""
        gradient, gradient_at = self.soonest(rank, "I")
        if gradient_at <= now:
            self.start(now, rank, gradient, "I")
            return
        forward, forward_at = self.forward(now, rank)
        may_wait = gradient_at - now <= self.policy.idleness_seconds[rank] - self.idle[rank]
        if forward_at <= now:
            ends = now + self.seconds[forward]["F"]
            if not may_wait or ends <= gradient_at + self.policy.forward_patience_seconds[rank]:
                self.start(now, rank, forward, "F")
                return
        weight = self.weight(rank)
        if weight >= 0 and self.fills(now, rank, weight, min(gradient_at, forward_at if forward_at > now else math.inf)):
            self.start(now, rank, weight, "W")
            return
        later = [time for time in (gradient_at, forward_at) if now < time < math.inf]
        if later:
            heapq.heappush(self.turns, (min(later), rank))

    def fills(self, now: float, rank: int, stage: int, arrival: float) -> bool:
        """Whether a W of `stage` fits before what arrives at `arrival`, or the rank has idled enough."""
        if arrival - now > self.policy.idleness_seconds[rank] - self.idle[rank]:
            return True
        return now + self.seconds[stage]["W"] <= arrival + self.policy.weight_patience_seconds[rank]

    def soonest(self, rank: int, kind: str) -> tuple[int, float]:
        """The stage whose next `kind` is, or will be, there first and when; infinitely late where nothing is on its way."""
        best, best_at = -1, math.inf
        counts, missing, arrival = self.count[kind], self.missing[kind], self.arrival[kind]
        for stage in self.of_rank[rank]:
            number = counts[stage]
            if number < self.problem.num_microbatches and not missing[stage][number] and arrival[stage][number] < best_at:
                best, best_at = stage, arrival[stage][number]
        return best, best_at

    def forward(self, now: float, rank: int) -> tuple[int, float]:
        """The forward that may run next, by memory and policy: of those that are there the one of the latest stage."""
        best, best_at = -1, math.inf
        limit = self.problem.saved_bytes_limit[rank]
        # Each later stage of the rank keeps one place, as it keeps memory: else those before could wait for it for ever.
        places = max(self.policy.ahead[rank], len(self.of_rank[rank])) - self.ahead[rank]
        for stage in self.of_rank[rank][:places]:
            number = self.count["F"][stage]
            if number == self.problem.num_microbatches or self.missing["F"][stage][number]:
                continue
            needed = self.saved[rank] + self.problem.cost.stages[stage].saved_bytes + self.reserve[stage]
            if needed <= limit * (1 + _TINY):
                at = max(self.arrival["F"][stage][number], now)
                if at < best_at:
                    best, best_at = stage, at
        return best, best_at

    def weight(self, rank: int) -> int:
        """The stage with a W to do: the one that is furthest behind."""
        behind = {stage: self.count["I"][stage] - self.count["W"][stage] for stage in self.of_rank[rank]}
        stage = max(behind, key=lambda each: behind[each], default=-1)
        return stage if stage >= 0 and behind[stage] > 0 else -1

    def start(self, now: float, rank: int, stage: int, kind: Kind) -> None:
        price, number = self.problem.cost.stages[stage], self.count[kind][stage]
        self.count[kind][stage] += 1
        self.orders[rank].append(Action(stage, kind, number))
        if self.first[rank] == math.inf:
            self.first[rank] = now
        else:
            self.idle[rank] += now - self.free[rank]
        end = self.free[rank] = now + self.seconds[stage][kind]
        heapq.heappush(self.turns, (end, rank))
        if kind == "F":
            self.ahead[rank] += 1
            self.saved[rank] += price.saved_bytes
            self.arrive("I", stage, number, end, now)
            for target, delay in self.forward_to[stage]:
                self.arrive("F", target, number, end + delay, now)
        else:
            self.saved[rank] -= price.freed_bytes(kind)
        if kind == "I":
            self.ahead[rank] -= 1
            for target, delay in self.backward_to[stage]:
                self.arrive("I", target, number, end + delay, now)

    def arrive(self, kind: str, stage: int, number: int, at: float, now: float) -> None:
        """An input of `kind` will be there at `at`; the rank hears of it now and may plan for it."""
        self.missing[kind][stage][number] -= 1
        self.arrival[kind][stage][number] = max(self.arrival[kind][stage][number], at)
        if not self.missing[kind][stage][number]:
            rank = self.problem.stages[stage]
            heapq.heappush(self.turns, (max(now, self.free[rank]), rank))


def round_trips(problem: OrderingProblem) -> dict[int, float]:
    """For each stage, seconds from the start of a forward there to the earliest arrival of its gradient."""
    cost = problem.cost
    out: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for edge, price in cost.edges.items():
        out[edge.source].append((edge.target, problem.communication_seconds(edge.source, edge.target, price.seconds)))
    trips: dict[int, float] = {}
    for stage in reversed(range(len(cost.stages))):
        there = [2 * delay + trips[target] + cost.stages[target].seconds("I") for target, delay in out[stage]]
        trips[stage] = cost.stages[stage].seconds("F") + max(there, default=0.0)
    return trips


def natural_ahead(problem: OrderingProblem) -> tuple[int, ...]:
    """For each rank, forwards until the first gradient is back, coming as fast as the slowest stage before lets them."""
    trips = round_trips(problem)
    forwards: Sequence[float] = [stage.seconds("F") for stage in problem.cost.stages]
    counts: list[int] = []
    for rank in range(problem.num_ranks):
        stages = problem.stages_of(rank)
        slowest = max(forwards[: min(stages, default=0) + 1])
        counts.append(max(1, math.floor(trips[stages[0]] / slowest + _TINY)) if stages and slowest > 0 else 1)
    return tuple(counts)
