"""An assignment problem: choose one candidate for every node so that work plus changes of state cost least.

It knows nothing of tensors. A *state* is any hashable (a `Sharding`); a *value* is one result of one node, named
`(node, result)`. The candidate of a node says which state each operand must be in and which state each result
then is in. Where a consumer needs another state than the producer gives, the value is transported: charged once
per (value, needed state), however many consumers need it; and not at all where the needed state is a slice of
another needed state (after an all-reduce for one consumer, a second consumer's shard is free).

    minimise  Σ seconds(candidate of node)  +  Σ over values of transport(state given, states needed)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

State = Hashable
ValueIndex = tuple[int, int]
Slices = Callable[[State, State], bool]
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Candidate:
    """One alternative of a node: operand states needed, result states given, and what it costs by itself."""

    operands: tuple[State, ...]
    results: tuple[State, ...]
    seconds: float


@dataclass(frozen=True)
class Choice:
    """A node: whose values it reads, and its candidates. Nodes of unequal `kind` are never folded into one.

    A view has one operand and one result, costs (almost) nothing, and its operand is transported at the price of its result.

    A producer may come later in the list than its consumer: a parameter reads its own gradient.
    """

    name: str
    operands: tuple[ValueIndex, ...]
    candidates: tuple[Candidate, ...]
    kind: Hashable = None
    is_view: bool = False

    @property
    def num_results(self) -> int:
        return len(self.candidates[0].results)


@dataclass(frozen=True)
class Problem:
    """`price(value, source, target)` in seconds is infinite where there is no way.

    `slices(state, other)` says whether `other` can be cut from `state` for nothing; it must be a strict order (no cycles).
    """

    nodes: tuple[Choice, ...]
    price: Callable[[ValueIndex, State, State], float]
    slices: Slices = lambda state, other: False

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


def transport_seconds(source: State, targets: Iterable[State], slices: Slices, price: Callable[[State, State], float]) -> float:
    """What it costs to have a value that is in `source` in all of `targets`."""
    return sum(price(source, target) for target, origin in origins(source, targets, slices).items() if origin == source)


def without_dominated(candidates: Sequence[Candidate]) -> list[int]:
    """Positions of the candidates worth keeping: of several with equal states only the cheapest, the first of equals."""
    best: dict[tuple[tuple[State, ...], tuple[State, ...]], int] = {}
    for position, candidate in enumerate(candidates):
        key = (candidate.operands, candidate.results)
        if key not in best or candidate.seconds < candidates[best[key]].seconds:
            best[key] = position
    return sorted(best.values())
