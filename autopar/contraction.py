"""Merges views into their neighbours, so that a value is transported at one place of a chain of views and not at each.

A view costs nothing and keeps the bytes of its value, so a change of state costs the same before it as after it. A view
that one reader reads is merged into that reader; else, where it alone reads its producer, into the producer. The merged
node's candidates are those pairs in which one gives the state that the other needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.assignment import Candidate, Choice, Problem, State, ValueIndex

# A merge that would multiply candidates beyond this is left out.
_GROWTH = 1.25
_Readers = dict[ValueIndex, list[tuple[int, int]]]


@dataclass(frozen=True)
class _Joined:
    """A candidate of a merged node, and the candidate that each original node takes in it."""

    candidate: Candidate
    picks: tuple[tuple[int, int], ...]


@dataclass
class _Group:
    """Merged nodes: the values read, the node whose results are given, and the joined candidates."""

    reads: list[ValueIndex]
    gives: int
    joined: list[_Joined]
    kind: tuple[object, ...]


@dataclass(frozen=True)
class Contracted:
    """The smaller problem; `group_of[i]` is the node of it that original node i is part of, `picks[g][k][i]` what
    original node i takes in candidate k of node g."""

    problem: Problem
    group_of: tuple[int, ...]
    picks: tuple[tuple[dict[int, int], ...], ...]

    def original(self, picks: Sequence[int]) -> list[int]:
        """The candidate of every original node from one of every node of the smaller problem."""
        return [self.picks[group][picks[group]][index] for index, group in enumerate(self.group_of)]


def contract(problem: Problem) -> Contracted:
    """`problem` with its views (`Choice.is_view`) merged where that loses nothing."""
    groups: dict[int, _Group] = {}
    for index, node in enumerate(problem.nodes):
        joined = [_Joined(candidate, ((index, position),)) for position, candidate in enumerate(node.candidates)]
        groups[index] = _Group(list(node.operands), index, joined, (node.kind,))
    member: list[int] = list(range(len(problem.nodes)))
    readers = problem.consumers()
    for index in reversed(range(len(problem.nodes))):
        if problem.nodes[index].is_view:
            _merge_view(problem, groups, member, readers, index)
    return _rebuilt(problem, groups, _roots(member))


def _merge_view(problem: Problem, groups: dict[int, _Group], member: list[int], readers: _Readers, index: int) -> None:
    group = _root(member, index)
    if groups[group].gives != index:
        return
    read_by = readers.get((index, 0), [])
    if len(read_by) == 1 and _try(groups, member, group, _root(member, read_by[0][0]), view_first=True):
        return
    producer, result = problem.nodes[index].operands[0]
    source = _root(member, producer)
    alone = len(readers[producer, result]) == 1 and problem.nodes[producer].num_results == 1
    if alone and groups[source].gives == producer:
        _try(groups, member, source, group, view_first=False)


def _try(groups: dict[int, _Group], member: list[int], first: int, second: int, view_first: bool) -> bool:
    """Merge group `first` into group `second`, which reads its only result once, unless that would lose something."""
    before, after = groups[first], groups[second]
    value = (before.gives, 0)
    if first == second or after.reads.count(value) != 1:
        return False
    slot = after.reads.index(value)
    given: dict[State, list[_Joined]] = {}
    for each in before.joined:
        given.setdefault(each.candidate.results[0], []).append(each)
    needed = {each.candidate.operands[slot] for each in after.joined}
    # Every state of the neighbour must pass through the view: one that does not must be changed between the two.
    if not (needed <= set(given) if view_first else set(given) <= needed):
        return False
    joined = [_join(left, right, slot) for right in after.joined for left in given.get(right.candidate.operands[slot], ())]
    if len(joined) > _GROWTH * max(len(before.joined), len(after.joined)):
        return False
    reads = after.reads[:slot] + before.reads + after.reads[slot + 1 :]
    groups[second] = _Group(reads, after.gives, joined, (*before.kind, slot, *after.kind))
    del groups[first]
    member[first] = second
    return True


def _join(left: _Joined, right: _Joined, slot: int) -> _Joined:
    first, second = left.candidate, right.candidate
    operands = second.operands[:slot] + first.operands + second.operands[slot + 1 :]
    return _Joined(Candidate(operands, second.results, first.seconds + second.seconds), left.picks + right.picks)


def _root(member: list[int], index: int) -> int:
    while member[index] != index:
        index = member[index]
    return index


def _roots(member: list[int]) -> list[int]:
    return [_root(member, index) for index in range(len(member))]


def _rebuilt(problem: Problem, groups: dict[int, _Group], roots: list[int]) -> Contracted:
    number = {root: position for position, root in enumerate(sorted(groups))}
    ordered = [groups[root] for root in sorted(groups)]
    giver = {group.gives: position for position, group in enumerate(ordered)}
    nodes = tuple(
        Choice(
            problem.nodes[group.gives].name,
            tuple((giver[producer], result) for producer, result in group.reads),
            tuple(each.candidate for each in group.joined),
            group.kind,
        )
        for group in ordered
    )

    def price(value: ValueIndex, source: State, target: State) -> float:
        return problem.price((ordered[value[0]].gives, value[1]), source, target)

    picks = tuple(tuple(dict(each.picks) for each in group.joined) for group in ordered)
    return Contracted(Problem(nodes, price, problem.slices), tuple(number[root] for root in roots), picks)
