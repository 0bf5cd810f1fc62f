"""Merges views into their neighbours, so that a value is converted at one place of a chain of views and not at each.

A view costs nothing and keeps the bytes of its value, so a change of state costs the same before it as after it. A view
that one reader reads is merged into that reader; else, where it alone reads its producer, into the producer. The merged
node's candidates are those pairs in which one gives the state that the other needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem, State, ValueIndex

# A merge that would multiply candidates beyond this is left out.
_GROWTH = 1.25


@dataclass(frozen=True)
class _Joined:
    """A candidate of a merged node, and which candidate each of its members takes in it."""

    candidate: Candidate
    picks: tuple[int, ...]


@dataclass
class _Group:
    """Merged nodes: the values read, the node whose results are given, the members, and the joined candidates."""

    reads: list[ValueIndex]
    gives: int
    members: tuple[int, ...]
    joined: tuple[_Joined, ...]
    kind: tuple[object, ...]


@dataclass(frozen=True)
class Contracted:
    """The smaller problem. Original node i is part of its node `group_of[i]`; in candidate k of node g, `members[g]` take `picks[g][k]`."""

    problem: Problem
    group_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    picks: tuple[tuple[tuple[int, ...], ...], ...]

    def pick_of(self, index: int, position: int) -> int:
        """What original node `index` takes in the candidate at `position` of its group."""
        group = self.group_of[index]
        return self.picks[group][position][self.members[group].index(index)]

    def original(self, picks: Sequence[int]) -> list[int]:
        """The candidate of every original node from one of every node of the smaller problem."""
        found = [0] * len(self.group_of)
        for members, joined, pick in zip(self.members, self.picks, picks, strict=True):
            for index, taken in zip(members, joined[pick], strict=True):
                found[index] = taken
        return found


def contract(problem: Problem) -> Contracted:
    """`problem` with its views (`AssignmentNode.is_view`) merged where that loses nothing."""
    merger = _Merger(problem)
    for index in reversed(range(len(problem.nodes))):
        if problem.nodes[index].is_view:
            merger.merge_view(index)
    return merger.rebuilt()


class _Merger:
    """Groups of merged nodes. What was worked out for one layer serves its like: candidates are shared objects."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._readers = problem.consumers()
        self._root = list(range(len(problem.nodes)))
        self._joins: dict[tuple[int, int, int, bool], tuple[_Joined, ...] | None] = {}
        # Keeps what the ids above stand for alive.
        self._seen: list[tuple[_Joined, ...]] = []
        starts: dict[int, tuple[_Joined, ...]] = {}
        self._groups: dict[int, _Group] = {}
        for index, node in enumerate(problem.nodes):
            if id(node.candidates) not in starts:
                starts[id(node.candidates)] = tuple(_Joined(candidate, (number,)) for number, candidate in enumerate(node.candidates))
            self._groups[index] = _Group(list(node.operands), index, (index,), starts[id(node.candidates)], (node.kind,))

    def group_of(self, index: int) -> int:
        while self._root[index] != index:
            index = self._root[index]
        return index

    def merge_view(self, index: int) -> None:
        """Merge a view into its one reader, else into its producer, which it alone reads."""
        group = self.group_of(index)
        if self._groups[group].gives != index:
            return
        read_by = self._readers.get((index, 0), [])
        if len(read_by) == 1 and self._try(group, self.group_of(read_by[0][0]), view_first=True):
            return
        producer, result = self.problem.nodes[index].operands[0]
        source = self.group_of(producer)
        alone = len(self._readers[producer, result]) == 1 and self.problem.nodes[producer].num_results == 1
        if alone and self._groups[source].gives == producer:
            self._try(source, group, view_first=False)

    def _try(self, first: int, second: int, view_first: bool) -> bool:
        """Merge group `first` into group `second`, which reads its only result once, unless that would lose something."""
        before, after = self._groups[first], self._groups[second]
        value = (before.gives, 0)
        if first == second or after.reads.count(value) != 1:
            return False
        slot = after.reads.index(value)
        key = (id(before.joined), id(after.joined), slot, view_first)
        if key not in self._joins:
            self._joins[key] = _joined(before.joined, after.joined, slot, view_first)
            self._seen += [before.joined, after.joined]
        joined = self._joins[key]
        if joined is None:
            return False
        reads = after.reads[:slot] + before.reads + after.reads[slot + 1 :]
        members, kind = before.members + after.members, (*before.kind, slot, *after.kind)
        self._groups[second] = _Group(reads, after.gives, members, joined, kind)
        del self._groups[first]
        self._root[first] = second
        return True

    def rebuilt(self) -> Contracted:
        problem = self.problem
        number = {root: position for position, root in enumerate(sorted(self._groups))}
        ordered = [self._groups[root] for root in sorted(self._groups)]
        giver = {group.gives: position for position, group in enumerate(ordered)}
        candidates: dict[int, tuple[Candidate, ...]] = {}
        for group in ordered:
            if id(group.joined) not in candidates:
                candidates[id(group.joined)] = tuple(each.candidate for each in group.joined)
        nodes = tuple(
            AssignmentNode(
                problem.nodes[group.gives].name,
                tuple((giver[producer], result) for producer, result in group.reads),
                candidates[id(group.joined)],
                group.kind,
                phase=problem.nodes[group.members[0]].phase,
            )
            for group in ordered
        )

        def price(value: ValueIndex, source: State, target: State) -> float:
            return problem.price((ordered[value[0]].gives, value[1]), source, target)

        def price_class(value: ValueIndex) -> Hashable:
            return problem.price_class((ordered[value[0]].gives, value[1]))

        smaller = Problem(nodes, price, problem.slices, price_class, problem.capacity_bytes)
        members = tuple(group.members for group in ordered)
        picks = tuple(tuple(each.picks for each in group.joined) for group in ordered)
        return Contracted(smaller, tuple(number[self.group_of(index)] for index in range(len(problem.nodes))), members, picks)


def _joined(first: tuple[_Joined, ...], second: tuple[_Joined, ...], slot: int, view_first: bool) -> tuple[_Joined, ...] | None:
    """Every pair that fits; None where merging would lose or multiply candidates."""
    given: dict[State, list[_Joined]] = {}
    for each in first:
        given.setdefault(each.candidate.results[0], []).append(each)
    needed = {each.candidate.operands[slot] for each in second}
    # Every state of the neighbour must pass through the view: one that does not must be changed between the two.
    if not (needed <= set(given) if view_first else set(given) <= needed):
        return None
    joined = tuple(_join(left, right, slot) for right in second for left in given.get(right.candidate.operands[slot], ()))
    return joined if len(joined) <= _GROWTH * max(len(first), len(second)) else None


def _join(left: _Joined, right: _Joined, slot: int) -> _Joined:
    first, second = left.candidate, right.candidate
    candidate = Candidate(
        second.operands[:slot] + first.operands + second.operands[slot + 1 :],
        second.results,
        first.seconds + second.seconds,
        first.held_bytes + second.held_bytes,
        max(first.working_bytes, second.working_bytes),
    )
    return _Joined(candidate, left.picks + right.picks)
