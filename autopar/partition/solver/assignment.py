"""An assignment problem: choose one candidate for every node so that work plus changes of state cost least.

It knows nothing of tensors. A *state* is any hashable (a `Sharding`); a *value* is one result of one node, named
`(node, result)`. The candidate of a node says which state each operand must be in and which state each result
then is in. Where a consumer needs another state than the producer gives, the value is converted: charged once
per (value, needed state), however many consumers need it; and not at all where the needed state is a slice of
another needed state (after an all-reduce for one consumer, a second consumer's shard is free).

    minimise  Σ seconds(candidate of node)  +  Σ over values of conversion(state given, states needed)
    so that   Σ held bytes(candidate of node)  +  max working bytes(candidate of node)  ≤  capacity
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

State = Hashable
ValueIndex = tuple[int, int]
Slices = Callable[[State, State], bool]
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Candidate:
    """One alternative of a node: operand states needed, result states given, and what it costs by itself.

    It holds `held_bytes` from then on, and `working_bytes` while it runs.
    """

    operands: tuple[State, ...]
    results: tuple[State, ...]
    seconds: float
    held_bytes: float = 0.0
    working_bytes: float = 0.0


@dataclass(frozen=True)
class AssignmentNode:
    """A node: whose values it reads, and its candidates. Nodes of unequal `kind` are never folded into one.

    A view has one operand and one result, costs (almost) nothing, and its operand is converted at the price of its result.

    A producer may come later in the list than its consumer: a parameter reads its own gradient. What is brought to the readers
    of one `phase` is gone in the next one.
    """

    name: str
    operands: tuple[ValueIndex, ...]
    candidates: tuple[Candidate, ...]
    kind: Hashable = None
    is_view: bool = False
    phase: str = ""

    @property
    def num_results(self) -> int:
        return len(self.candidates[0].results)


@dataclass(frozen=True)
class Problem:
    """`price(value, source, target)` in seconds is infinite where there is no way.

    `slices(state, other)` says whether `other` can be cut from `state` for nothing; it must be a strict order (no cycles).
    Values of one `price_class` have equal prices. All held bytes, and the largest working bytes, fit into `capacity_bytes`.
    """

    nodes: tuple[AssignmentNode, ...]
    price: Callable[[ValueIndex, State, State], float]
    slices: Slices = lambda state, other: False
    price_class: Callable[[ValueIndex], Hashable] = lambda value: value
    capacity_bytes: float = math.inf

    def consumers(self) -> dict[ValueIndex, list[tuple[int, int]]]:
        """For each value the (node, operand slot) pairs that read it."""
        found: dict[ValueIndex, list[tuple[int, int]]] = {}
        for index, node in enumerate(self.nodes):
            for slot, value in enumerate(node.operands):
                found.setdefault(value, []).append((index, slot))
        return found


def origins(source: S, targets: Iterable[S], slices: Callable[[S, S], bool]) -> dict[S, S]:
    """Where each of `targets` (but `source` itself) is taken from: `source`, or another target of which it is a slice.

    Ordered so that an origin stands before what is cut from it.
    """
    needed = [target for target in dict.fromkeys(targets) if target != source]
    found: dict[S, S] = {}
    for target in needed:
        hubs = [hub for hub in needed if slices(hub, target)] if not slices(source, target) else []
        # A hub that is itself cut from another one is no better than that one.
        found[target] = next((hub for hub in hubs if not any(slices(other, hub) for other in hubs)), source)
    return dict(sorted(found.items(), key=lambda item: item[1] != source))


def conversion_seconds(source: State, targets: Iterable[State], slices: Slices, price: Callable[[State, State], float]) -> float:
    """What it costs to have a value that is in `source` in all of `targets`."""
    return sum(price(source, target) for target, origin in origins(source, targets, slices).items() if origin == source)


def without_dominated(candidates: Sequence[Candidate]) -> list[int]:
    """Positions of the candidates worth keeping: with equal states, those that no other beats in time and bytes, of equals the first."""
    alike: dict[tuple[tuple[State, ...], tuple[State, ...]], list[int]] = {}
    for position, candidate in enumerate(candidates):
        kept = alike.setdefault((candidate.operands, candidate.results), [])
        if not any(_dominates(candidates[other], candidate) for other in kept):
            kept[:] = [other for other in kept if not _dominates(candidate, candidates[other])] + [position]
    return sorted(position for kept in alike.values() for position in kept)


def _dominates(one: Candidate, other: Candidate) -> bool:
    return one.seconds <= other.seconds and one.held_bytes <= other.held_bytes and one.working_bytes <= other.working_bytes
