"""What an assignment costs, exactly: the yardstick of the search, and what tells the runner-up of a decision."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from functools import partial

from autopar.partition.solver.assignment import Problem, State, ValueIndex, conversion_seconds
from autopar.partition.solver.folding import Folded, FoldedValue, fold

# How often `descend` goes through all classes.
_MOST_SWEEPS = 20


class Evaluation:
    """Prices complete assignments of a folded problem, and single changes of one.

    `picks` below holds a candidate's position for each *class*; without folding every node is a class of its own.
    """

    def __init__(self, problem: Problem, folded: Folded | None = None) -> None:
        self.problem = problem
        self.folded = folded or fold(problem, None)
        self.nodes = [problem.nodes[member] for member in self.folded.members]
        self._prices: dict[tuple[Hashable, State, State], float] = {}
        self._touching: list[list[FoldedValue]] = [[] for _ in self.nodes]
        for value in self.folded.values:
            for number in {value.producer, *(reader for reader, _ in value.readers)}:
                self._touching[number].append(value)

    def seconds(self, picks: Sequence[int]) -> float:
        """What the whole problem costs."""
        return sum(map(self._work, range(len(picks)), picks)) + sum(
            value.count * self.conversion_seconds(value, picks) for value in self.folded.values
        )

    def num_bytes(self, picks: Sequence[int]) -> float:
        """What the whole problem holds, and the most that a node needs on top while it runs."""
        held = sum(self._held_bytes(number, pick) for number, pick in enumerate(picks))
        return held + max(node.candidates[pick].working_bytes for node, pick in zip(self.nodes, picks, strict=True))

    def conversion_seconds(self, value: FoldedValue, picks: Sequence[int]) -> float:
        """Seconds to bring one of the values to its readers."""
        source = self.nodes[value.producer].candidates[picks[value.producer]].results[value.result]
        targets = [self.nodes[number].candidates[picks[number]].operands[slot] for number, slot in value.readers]
        return conversion_seconds(source, targets, self.problem.slices, partial(self._price, value.example))

    def _price(self, value: ValueIndex, source: State, target: State) -> float:
        key = self.problem.price_class(value), source, target
        if key not in self._prices:
            self._prices[key] = self.problem.price(value, source, target)
        return self._prices[key]

    def local_seconds(self, number: int, picks: Sequence[int]) -> float:
        """The part of the cost that depends on one class: its work, and the conversion of what it reads and gives."""
        return self._work(number, picks[number]) + sum(
            value.count * self.conversion_seconds(value, picks) for value in self._touching[number]
        )

    def saved_seconds(self, changed: Iterable[int], picks: Sequence[int], wanted: Sequence[int]) -> float:
        """What `picks` cost more than the same with these classes as in `wanted`."""
        mixed = dict.fromkeys(changed)
        after = [wanted[number] if number in mixed else pick for number, pick in enumerate(picks)]
        values = {id(value): value for number in mixed for value in self._touching[number]}.values()
        moved = sum(value.count * (self.conversion_seconds(value, picks) - self.conversion_seconds(value, after)) for value in values)
        return moved + sum(self._work(number, picks[number]) - self._work(number, wanted[number]) for number in mixed)

    def runner_up(self, number: int, picks: Sequence[int], allowed: Sequence[int] | None = None) -> tuple[int, float] | None:
        """The next-best candidate of a class (among `allowed`), everything else as it is, and the seconds it adds; None without another."""
        changed = list(picks)
        now = self.local_seconds(number, picks)
        best: tuple[int, float] | None = None
        # Many candidates need and give the same states of a value.
        known: list[dict[tuple[State, ...], float]] = [{} for _ in self._touching[number]]
        for pick in range(len(self.nodes[number].candidates)) if allowed is None else allowed:
            changed[number] = pick
            extra = self._work(number, pick) - now
            for value, seen in zip(self._touching[number], known, strict=True):
                states = self._states(value, number, pick)
                if states not in seen:
                    seen[states] = value.count * self.conversion_seconds(value, changed)
                extra += seen[states]
            if pick != picks[number] and extra < math.inf and (best is None or extra < best[1]):
                best = (pick, extra)
        return best

    def descend(self, picks: Sequence[int]) -> list[int]:
        """Improve `picks` one class at a time until nothing gets better, within the capacity: a start for the solver, no optimum."""
        found = list(picks)
        room = self.problem.capacity_bytes - sum(self._held_bytes(number, pick) for number, pick in enumerate(found))
        for _ in range(_MOST_SWEEPS):
            changed = False
            for number in range(len(self.nodes)):
                allowed = self._fitting(number, found[number], room)
                better = self.runner_up(number, found, allowed)
                if better is not None and better[1] < -1e-9 * abs(self.local_seconds(number, found)):
                    room += self._held_bytes(number, found[number]) - self._held_bytes(number, better[0])
                    found[number] = better[0]
                    changed = True
            if not changed:
                break
        return found

    def _states(self, value: FoldedValue, number: int, pick: int) -> tuple[State, ...]:
        """What a candidate of a class gives and needs of a value."""
        candidate = self.nodes[number].candidates[pick]
        needed = [candidate.operands[slot] for reader, slot in value.readers if reader == number]
        return (candidate.results[value.result], *needed) if value.producer == number else tuple(needed)

    def _work(self, number: int, pick: int) -> float:
        return self.folded.sizes[number] * self.nodes[number].candidates[pick].seconds

    def _held_bytes(self, number: int, pick: int) -> float:
        return self.folded.sizes[number] * self.nodes[number].candidates[pick].held_bytes

    def _fitting(self, number: int, now: int, room: float) -> list[int]:
        """The candidates of a class that hold no more than it holds now and `room`, and work within what that leaves."""
        room += self._held_bytes(number, now)
        candidates = self.nodes[number].candidates
        return [pick for pick, each in enumerate(candidates) if self._held_bytes(number, pick) + each.working_bytes <= room or pick == now]
