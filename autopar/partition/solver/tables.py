"""A folded assignment problem as arrays: the cost of each candidate, and of each value the states in which it is given and needed.

States of a value are numbered; a candidate is known by the numbers of the states that it gives and needs. What a change
of state costs is a matrix [given, needed], made once for all values of equal `price_class` and states.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.partition.solver.assignment import Problem, State, ValueIndex
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import FoldedValue

# Stands for "no way"; sums of it stay finite, where differences of infinities would not be numbers.
NO_WAY = 1e30
IS_NO_WAY = 1e20

Array = np.ndarray


@dataclass(frozen=True)
class Conversion:
    """One folded value, brought from the state it is made in to those that are needed. Port 0 is its producer, the others its readers.

    nodes     the class of nodes at each port
    states    per port and candidate of that class, the number of the state it gives (port 0) or needs
    price     [given, needed] seconds of bringing the value from one state to another, for all values folded into this
    cuts      [given, needed] 0 where a needed state is the given one or a slice of it, else NO_WAY
    slices    [needed, needed] 0 where the second state is the first one or a slice of it, else NO_WAY
    """

    nodes: tuple[int, ...]
    states: tuple[Array, ...]
    price: Array
    cuts: Array
    slices: Array


@dataclass(frozen=True)
class Tables:
    """By class and candidate: seconds and held bytes of all nodes of the class together, working bytes of one; a `Conversion` a value."""

    seconds: tuple[Array, ...]
    held_bytes: tuple[Array, ...]
    working_bytes: tuple[Array, ...]
    conversions: tuple[Conversion, ...]
    capacity_bytes: float

    @staticmethod
    def of(evaluation: Evaluation) -> Tables:
        folded, nodes = evaluation.folded, evaluation.nodes
        seconds = [size * np.array([each.seconds for each in node.candidates]) for node, size in zip(nodes, folded.sizes, strict=True)]
        prices = _Prices(evaluation.problem)
        conversions: list[Conversion] = []
        for value in folded.values:
            made = _conversion(value, evaluation, prices)
            if len(made.nodes) == 2 and made.nodes[0] == made.nodes[1]:
                # A node that reads its own class: what it gives and needs is known together.
                seconds[made.nodes[0]] = seconds[made.nodes[0]] + _direct(made)[made.states[0], made.states[1]]
            elif made.price.size > 1 or made.price[0, 0] > 0:
                conversions.append(made)
        held = [size * np.array([each.held_bytes for each in node.candidates]) for node, size in zip(nodes, folded.sizes, strict=True)]
        working = [np.array([each.working_bytes for each in node.candidates]) for node in nodes]
        return Tables(tuple(seconds), tuple(held), tuple(working), tuple(conversions), evaluation.problem.capacity_bytes)

    def num_bytes(self, picks: Sequence[int]) -> float:
        """What an assignment holds, and the most that a node needs on top while it runs."""
        return self.held(picks) + max(float(each[pick]) for each, pick in zip(self.working_bytes, picks, strict=True))

    def held(self, picks: Sequence[int]) -> float:
        return sum(float(each[pick]) for each, pick in zip(self.held_bytes, picks, strict=True))

    @property
    def least_bytes(self) -> float:
        """No assignment takes less."""
        return sum(float(each.min()) for each in self.held_bytes) + self.least_working_bytes

    @property
    def least_working_bytes(self) -> float:
        return max(float(each.min()) for each in self.working_bytes)


def _direct(conversion: Conversion) -> Array:
    return np.minimum(conversion.price, conversion.cuts)


def _conversion(value: FoldedValue, evaluation: Evaluation, prices: _Prices) -> Conversion:
    given = [candidate.results[value.result] for candidate in evaluation.nodes[value.producer].candidates]
    needed = [[candidate.operands[slot] for candidate in evaluation.nodes[number].candidates] for number, slot in value.readers]
    sources = list(dict.fromkeys(given))
    targets = list(dict.fromkeys(state for states in needed for state in states))
    price, cuts, slices = prices.between(value.example, sources, targets)
    return Conversion(
        nodes=(value.producer, *(number for number, _ in value.readers)),
        states=(_numbers(given, sources), *(_numbers(states, targets) for states in needed)),
        price=np.minimum(price * value.count, NO_WAY),
        cuts=cuts,
        slices=slices,
    )


def _numbers(states: Sequence[State], known: Sequence[State]) -> Array:
    number = {state: position for position, state in enumerate(known)}
    return np.array([number[state] for state in states])


class _Prices:
    """Prices and slices between states, as matrices that grow; each pair of a price class is asked for once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._numbers: dict[State, int] = {}
        self._states: list[State] = []
        self._seconds: dict[Hashable, Array] = {}
        self._slices = _unknown(0)

    def between(self, value: ValueIndex, sources: list[State], targets: list[State]) -> tuple[Array, Array, Array]:
        """For one value: seconds and cuts [source, target], slices [target, target]."""
        rows, columns = self._number(sources), self._number(targets)
        family = self._problem.price_class(value)
        seconds = self._seconds[family] = _grown(self._seconds.get(family, _unknown(0)), len(self._states))
        self._slices = _grown(self._slices, len(self._states))
        price = self._filled(seconds, rows, columns, lambda a, b: min(self._problem.price(value, a, b), NO_WAY))
        cuts, slices = (self._filled(self._slices, each, columns, self._cut) for each in (rows, columns))
        return price, cuts, slices

    def _number(self, states: list[State]) -> list[int]:
        for state in states:
            if state not in self._numbers:
                self._numbers[state] = len(self._states)
                self._states.append(state)
        return [self._numbers[state] for state in states]

    def _filled(self, known: Array, rows: list[int], columns: list[int], ask: Callable[[State, State], float]) -> Array:
        block = known[np.ix_(rows, columns)]
        for row, column in zip(*np.nonzero(np.isnan(block)), strict=True):
            source, target = rows[row], columns[column]
            block[row, column] = known[source, target] = ask(self._states[source], self._states[target])
        return block

    def _cut(self, state: State, other: State) -> float:
        return 0.0 if state == other or self._problem.slices(state, other) else NO_WAY


def _unknown(size: int) -> Array:
    return np.full((size, size), np.nan)


def _grown(known: Array, size: int) -> Array:
    """At least `size` rows and columns; grown by half to spare copies."""
    if len(known) >= size:
        return known
    larger = _unknown(size + size // 2)
    larger[: len(known), : len(known)] = known
    return larger
