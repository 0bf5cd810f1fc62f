"""Weight gradients off the critical path: the last step of `schedule="auto"`.

List scheduling lets a W start where it seems to fit, and now and then it makes an action late that the end of the longest
rank waits for. Such a W changes places with that action, one after the other, as long as the longest span does not grow:

    rank 1 | … 1I22 1W20 1W21 1I23 …        the path to the end goes through 1W21
    rank 1 | … 1I22 1W20 .1I23 1W21 …       now it waits a little, and the end comes sooner
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.actions import Action
from autopar.ir.turns import take_turns
from autopar.pipeline.list_schedule import Objective, OrderingProblem

Orders = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class _Times:
    start: dict[Action, float]
    end: dict[Action, float]
    # When the last of its inputs from other stages is there, and which action gives it.
    arrival: dict[Action, tuple[float, Action | None]]

    def lengths(self, orders: Orders, objective: Objective) -> list[float]:
        """Per rank, what is to be short: from its first start, or from the step's, to its last end."""
        begins = (self.start[order[0]] if order and objective == "span" else 0.0 for order in orders)
        return [self.end[order[-1]] - begin if order else 0.0 for order, begin in zip(orders, begins, strict=True)]


def shift_weights(problem: OrderingProblem, orders: Orders, max_shifts: int, objective: Objective = "span") -> Orders:
    """`orders` (F, I and W alone) with a longest span, or a step, that is the same or shorter, after at most `max_shifts` attempts."""
    shifts = _Shifts(problem, objective)
    times = shifts.times(orders)
    best = max(times.lengths(orders, objective))
    refused: set[tuple[Action, Action]] = set()
    for _ in range(max_shifts):
        pair = next((each for each in shifts.pairs(orders, times) if each not in refused), None)
        if pair is None:
            break
        refused.add(pair)
        rank = problem.stages[pair[0].stage]
        shifted = _swap(orders, rank, pair)
        if problem.peak_saved_bytes(shifted[rank]) > problem.saved_bytes_limit[rank] * (1 + 1e-9):
            continue
        new = shifts.times(shifted)
        longest = max(new.lengths(shifted, objective))
        if longest <= best * (1 + 1e-12):
            orders, times, best = shifted, new, min(best, longest)
    return orders


class _Shifts:
    def __init__(self, problem: OrderingProblem, objective: Objective) -> None:
        self.problem = problem
        self.objective: Objective = objective
        self.before: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.after: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for edge, price in problem.cost.edges.items():
            delay = problem.communication_seconds(edge.source, edge.target, price.seconds)
            self.before[edge.target].append((edge.source, delay))
            if edge.has_gradient:
                self.after[edge.source].append((edge.target, delay))

    def times(self, orders: Orders) -> _Times:
        """When everything starts and ends."""
        times = _Times({}, {}, {})
        free, rows = [0.0] * len(orders), dict(enumerate(orders))
        is_over = take_turns(rows, lambda rank, action: self.place(action, free, rank, times), dict.fromkeys(rows, 0))
        assert is_over, "shifting made a cycle"
        return times

    def place(self, action: Action, free: list[float], rank: int, times: _Times) -> bool:
        """Start `action` as soon as its inputs and its rank let it; False while an input has no time yet."""
        latest, giver = 0.0, None
        for source, delay in self.inputs(action):
            end = times.end.get(source)
            if end is None:
                return False
            if end + delay > latest:
                latest, giver = end + delay, source
        start = max(latest, free[rank])
        times.start[action], times.arrival[action] = start, (latest, giver)
        times.end[action] = free[rank] = start + self.problem.cost.action_seconds(action)
        return True

    def inputs(self, action: Action) -> Iterator[tuple[Action, float]]:
        if action.kind == "W":
            return
        neighbours = self.before if action.kind == "F" else self.after
        for stage, delay in neighbours[action.stage]:
            yield Action(stage, action.kind, action.microbatch), delay

    def pairs(self, orders: Orders, times: _Times) -> Iterator[tuple[Action, Action]]:
        """Every W on the path to the end of the longest rank that holds up the action after it; the last first."""
        lengths = times.lengths(orders, self.objective)
        rank = lengths.index(max(lengths))
        position = {action: index for order in orders for index, action in enumerate(order)}
        action: Action | None = orders[rank][-1]
        while action is not None:
            order, index = orders[self.problem.stages[action.stage]], position[action]
            arrival, giver = times.arrival[action]
            if arrival >= times.start[action] or not index:
                action = giver
                continue
            before = order[index - 1]
            if before.kind == "W" and action.kind != "W":
                yield before, action
            action = before


def _swap(orders: Orders, rank: int, pair: tuple[Action, Action]) -> Orders:
    order = orders[rank]
    index = order.index(pair[0])
    assert order[index + 1] == pair[1]
    return (*orders[:rank], (*order[:index], pair[1], pair[0], *order[index + 2 :]), *orders[rank + 1 :])
