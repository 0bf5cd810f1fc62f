"""What an assignment costs, exactly: the yardstick of the search, and what tells the runner-up of a decision."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.solver.assignment import Problem, transport_seconds
from autopar.solver.folding import Folded, FoldedValue, fold


class Evaluation:
    """Prices complete assignments of a folded problem, and single changes of one.

    `picks` below holds a candidate's position for each *class*; without folding every node is a class of its own.
    """

    def __init__(self, problem: Problem, folded: Folded | None = None) -> None:
        self.problem = problem
        self.folded = folded or fold(problem, None)
        self.nodes = [problem.nodes[member] for member in self.folded.members]
        self._touching: list[list[FoldedValue]] = [[] for _ in self.nodes]
        for value in self.folded.values:
            for number in {value.producer, *(reader for reader, _ in value.readers)}:
                self._touching[number].append(value)

    def seconds(self, picks: Sequence[int]) -> float:
        """What the whole problem costs."""
        work = sum(size * node.candidates[pick].seconds for size, node, pick in zip(self.folded.sizes, self.nodes, picks, strict=True))
        return work + sum(value.count * self.transport(value, picks) for value in self.folded.values)

    def num_bytes(self, picks: Sequence[int]) -> float:
        """What the whole problem holds, and the most that a node needs on top while it runs."""
        held = sum(self._held_bytes(number, pick) for number, pick in enumerate(picks))
        return held + max(node.candidates[pick].working_bytes for node, pick in zip(self.nodes, picks, strict=True))

    def transport(self, value: FoldedValue, picks: Sequence[int]) -> float:
        """Seconds to bring one of the values to its readers."""
        source = self.nodes[value.producer].candidates[picks[value.producer]].results[value.result]
        targets = [self.nodes[number].candidates[picks[number]].operands[slot] for number, slot in value.readers]
        return transport_seconds(source, targets, self.problem.slices, lambda a, b: self.problem.price(value.example, a, b))

    def local_seconds(self, number: int, picks: Sequence[int]) -> float:
        """The part of the cost that depends on one class: its work, and the transport of what it reads and gives."""
        work = self.folded.sizes[number] * self.nodes[number].candidates[picks[number]].seconds
        return work + sum(value.count * self.transport(value, picks) for value in self._touching[number])

    def runner_up(self, number: int, picks: Sequence[int], allowed: Sequence[int] | None = None) -> tuple[int, float] | None:
        """The next-best candidate of a class (among `allowed`), everything else as it is, and the seconds it adds; None without another."""
        changed = list(picks)
        now = self.local_seconds(number, picks)
        best: tuple[int, float] | None = None
        for pick in range(len(self.nodes[number].candidates)) if allowed is None else allowed:
            changed[number] = pick
            extra = self.local_seconds(number, changed) - now
            if pick != picks[number] and extra < math.inf and (best is None or extra < best[1]):
                best = (pick, extra)
        return best

    def descend(self, picks: Sequence[int], max_sweeps: int = 20) -> list[int]:
        """Improve `picks` one class at a time until nothing gets better, within the capacity: a start for the solver, no optimum."""
        found = list(picks)
        room = self.problem.capacity_bytes - sum(self._held_bytes(number, pick) for number, pick in enumerate(found))
        for _ in range(max_sweeps):
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

    def _held_bytes(self, number: int, pick: int) -> float:
        return self.folded.sizes[number] * self.nodes[number].candidates[pick].held_bytes

    def _fitting(self, number: int, now: int, room: float) -> list[int]:
        """The candidates of a class that hold no more than it holds now and `room`, and work within what that leaves."""
        room += self._held_bytes(number, now)
        candidates = self.nodes[number].candidates
        return [pick for pick, each in enumerate(candidates) if self._held_bytes(number, pick) + each.working_bytes <= room or pick == now]
