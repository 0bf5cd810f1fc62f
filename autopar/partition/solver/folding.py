"""Folds the repeated parts of an assignment problem: eighty equal layers are decided once.

Nodes are coloured as Weisfeiler and Lehman colour a graph: first by kind and candidates, then `rounds` times by
their own colour, the colours of what they read and the colours of who reads them. Nodes of equal colour take the
same candidate. Values are grouped more finely, by who reads them, so that the cost of the folded problem is the
exact cost of the same choice in the whole one. A fold that merges what should differ loses optimality, never legality.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autopar.partition.solver.assignment import Problem, ValueIndex

ROUNDS = 3


@dataclass(frozen=True)
class FoldedValue:
    """Values of one node class and result that the same (class, slot) pairs read in one phase. `example` stands for all `count` of them."""

    producer: int
    result: int
    readers: tuple[tuple[int, int], ...]
    count: int
    example: ValueIndex


@dataclass(frozen=True)
class Folded:
    """`class_of[node]`; for each class its size and one member; the values between classes."""

    class_of: tuple[int, ...]
    sizes: tuple[int, ...]
    members: tuple[int, ...]
    values: tuple[FoldedValue, ...]

    def unfold(self, picks: list[int]) -> list[int]:
        """A candidate for every node from one for every class."""
        return [picks[number] for number in self.class_of]


def fold(problem: Problem, rounds: int | None = ROUNDS) -> Folded:
    """Fold `problem`; `rounds=None` keeps every node by itself."""
    colours = list(range(len(problem.nodes))) if rounds is None else _colours(problem, rounds)
    members: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for index, colour in enumerate(colours):
        members.setdefault(colour, index)
        sizes[colour] = sizes.get(colour, 0) + 1
    number = {colour: position for position, colour in enumerate(members)}
    class_of = tuple(number[colour] for colour in colours)
    return Folded(class_of, tuple(sizes[c] for c in members), tuple(members.values()), _values(problem, class_of))


def _values(problem: Problem, class_of: tuple[int, ...]) -> tuple[FoldedValue, ...]:
    groups: dict[tuple[int, int, tuple[tuple[int, int], ...]], list[ValueIndex]] = {}
    for value, readers in problem.consumers().items():
        phases: dict[str, set[tuple[int, int]]] = {}
        for node, slot in readers:
            phases.setdefault(problem.nodes[node].phase, set()).add((class_of[node], slot))
        for found in phases.values():
            groups.setdefault((class_of[value[0]], value[1], tuple(sorted(found))), []).append(value)
    return tuple(FoldedValue(*key, len(values), values[0]) for key, values in groups.items())


def _colours(problem: Problem, rounds: int) -> list[int]:
    numbers: dict[Hashable, int] = {}
    alike = _numbered_once([node.candidates for node in problem.nodes])
    kinds = _numbered_once([node.kind for node in problem.nodes])
    colours = _numbered(list(zip(kinds, alike, strict=True)), numbers)
    consumers = problem.consumers()
    readers_of: list[list[tuple[int, int, int]]] = [[] for _ in problem.nodes]
    for (producer, result), readers in consumers.items():
        readers_of[producer] += [(result, node, slot) for node, slot in readers]
    for _ in range(rounds):
        seen: list[Hashable] = []
        for index, node in enumerate(problem.nodes):
            reads = tuple((colours[producer], result) for producer, result in node.operands)
            read_by = tuple(sorted((result, colours[reader], slot) for result, reader, slot in readers_of[index]))
            seen.append((colours[index], reads, read_by))
        colours = _numbered(seen, {})
    return colours


def _numbered(keys: list[Hashable], numbers: dict[Hashable, int]) -> list[int]:
    """Keys as small integers, equal for equal keys, in order of first appearance."""
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _numbered_once(keys: Sequence[Hashable]) -> list[int]:
    """`_numbered` for deep keys, of which many are one object: each object is hashed once."""
    numbers: dict[Hashable, int] = {}
    known: dict[int, int] = {}
    for key in keys:
        if id(key) not in known:
            known[id(key)] = numbers.setdefault(key, len(numbers))
    return [known[id(key)] for key in keys]
