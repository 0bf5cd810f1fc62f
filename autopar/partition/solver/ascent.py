"""Lower bounds for an assignment problem, and the assignment they point at: block-coordinate ascent on the dual.

Every node and every conversion of a value has potentials; what a potential takes from one it gives to another, so the
cost of every assignment stays what it was, while the sum of all minima, a lower bound, only rises. Nodes are visited in
order, forwards and backwards: each collects what its conversions would cost it, candidate by candidate, and hands on shares
to those ahead (sequential reweighted message passing: V. Kolmogorov, "A New Look at Reweighted Message Passing", PAMI 2015).

Candidates that no assignment can have are left out beforehand, so that all potentials are finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.partition.solver.min_marginals import MarginalTable, Parts, min_marginals_of
from autopar.partition.solver.tables import IS_NO_WAY, NO_WAY, Array, Tables


class _Port:
    """A conversion as seen from one node. `states[k]` is the state of its candidate k among the `num_states` of this port.

    The potentials of all ports are shared with the conversion's other ports; an array of them is replaced, never written into.
    """

    def __init__(self, way: MarginalTable | Parts, potentials: list[Array], port: int, states: Array, nodes: tuple[int, ...]) -> None:
        self.way = way
        self.potentials = potentials
        self.port = port
        self.states = states
        self.num_states = len(potentials[port])
        self._order = np.argsort(states, kind="stable")
        self._starts = np.searchsorted(states[self._order], np.arange(self.num_states))
        self.first, self.last = min(nodes), max(nodes)

    def min_marginals(self) -> Array:
        """The min-marginals: for each state at this port the least that the conversion costs with it, its own potentials left out."""
        return self.way.min_marginals(self.potentials, self.port)

    def by_state(self, potentials: Array) -> Array:
        """The least of a node's potentials for each state."""
        return np.minimum.reduceat(potentials.take(self._order), self._starts)

    def only(self, state: int) -> None:
        """Every other state is out of the running."""
        potentials = np.full(self.num_states, NO_WAY)
        potentials[state] = self.potentials[self.port][state]
        self.potentials[self.port] = potentials


class Ascent:
    """The dual of `tables`. `sweep` raises `bound`; `assignment` reads one off.

    `positions[n]` are the candidates of class n that an assignment can have; where a class has none, none is possible.
    Potentials are by these, assignments by the candidates of `tables`.
    """

    def __init__(self, tables: Tables, allowed: Sequence[Array] | None = None) -> None:
        """`allowed`: by class a boolean mask of the candidates to begin with."""
        masks = [np.ones(len(each), dtype=bool) for each in tables.seconds] if allowed is None else [each.copy() for each in allowed]
        ways = _possible(tables, masks)
        self.positions = [np.flatnonzero(mask) for mask in masks]
        self.is_impossible = not all(map(len, self.positions))
        self.nodes = [seconds[kept] for seconds, kept in zip(tables.seconds, self.positions, strict=True)]
        self._constant = 0.0
        self._ports: list[list[_Port]] = [[] for _ in self.nodes]
        self._conversions: list[_Port] = []
        for conversion, (way, states) in zip(tables.conversions, ways, strict=True) if not self.is_impossible else ():
            potentials = [np.zeros(int(each.max()) + 1) for each in states]
            ports = [_Port(way, potentials, port, each, conversion.nodes) for port, each in enumerate(states)]
            for port, node in zip(ports, conversion.nodes, strict=True):
                self._ports[node].append(port)
            self._conversions.append(ports[0])

    def bound(self) -> float:
        """No assignment costs less."""
        conversions = sum(float((first.min_marginals() + first.potentials[0]).min()) for first in self._conversions)
        return self._constant + sum(float(node.min()) for node in self.nodes) + conversions

    def sweep(self, forwards: bool) -> None:
        """Visit every node once."""
        order = range(len(self.nodes)) if forwards else reversed(range(len(self.nodes)))
        for number in order:
            self.collect(number)
            self.hand_on(number, forwards)

    def collect(self, number: int) -> Array:
        """Take from its conversions what they cost this node; its potentials are then how much dearer each candidate is than the best."""
        potentials = self.nodes[number]
        for port in self._ports[number]:
            marginals = port.min_marginals()
            potentials = potentials + (marginals + port.potentials[port.port]).take(port.states)
            port.potentials[port.port] = -marginals
        lowest = np.minimum.reduce(potentials)
        self._constant += float(lowest)
        self.nodes[number] = potentials - lowest
        return self.nodes[number]

    def hand_on(self, number: int, forwards: bool) -> None:
        """Give to the conversions that lead on, each an equal share of what the node holds."""
        ports = self._ports[number]
        ahead = [port for port in ports if (port.last > number if forwards else port.first < number)]
        shares = max(len(ahead), len(ports) - len(ahead))
        potentials = self.nodes[number]
        for port in ahead:
            given = port.by_state(potentials) / shares
            port.potentials[port.port] = port.potentials[port.port] + given
            potentials = potentials - given.take(port.states)
            shares -= 1
        self.nodes[number] = potentials

    def add(self, prices: Sequence[Array]) -> None:
        """Make every candidate of `tables` dearer (or cheaper) by so much."""
        self.nodes = [node + price[kept] for node, price, kept in zip(self.nodes, prices, self.positions, strict=True)]

    def assignment(self) -> list[int]:
        """A candidate for every class: one class after the other takes its best, given what those before it took."""
        kept = [list(first.potentials) for first in self._conversions]
        picks = [0] * len(self.nodes)
        for number, potentials in enumerate(self.nodes):
            for port in self._ports[number]:
                potentials = potentials + (port.min_marginals() + port.potentials[port.port]).take(port.states)
            pick = int(potentials.argmin())
            picks[number] = int(self.positions[number][pick])
            for port in self._ports[number]:
                port.only(port.states[pick])
        for first, potentials in zip(self._conversions, kept, strict=True):
            first.potentials[:] = potentials
        return picks


def _possible(tables: Tables, masks: list[Array]) -> list[tuple[MarginalTable | Parts, list[Array]]]:
    """Take out of `masks` the candidates whose states cannot be brought to, or from, any that is left, until all can.

    For each conversion what gives its min-marginals with what is left, and per port the numbers of the states of the candidates that
    are left; nothing where a class has no candidate left.
    """
    found: dict[int, tuple[MarginalTable | Parts, list[Array]]] = {}
    touching: list[set[int]] = [set() for _ in masks]
    for number, conversion in enumerate(tables.conversions):
        for node in conversion.nodes:
            touching[node].add(number)
    waiting = set(range(len(tables.conversions)))
    while waiting:
        now, waiting = sorted(waiting), set[int]()
        for number in now:
            conversion = tables.conversions[number]
            kept = [np.flatnonzero(masks[node]) for node in conversion.nodes]
            if not all(map(len, kept)):
                return []
            own, states = _used([each[left] for each, left in zip(conversion.states, kept, strict=True)])
            way = min_marginals_of(conversion, own)
            found[number] = way, states
            zeros = [np.zeros(len(each)) for each in own]
            for port, node in enumerate(conversion.nodes):
                is_dead = (way.min_marginals(zeros, port) > IS_NO_WAY)[states[port]]
                if is_dead.any():
                    masks[node][kept[port][is_dead]] = False
                    waiting |= touching[node]
    return [found[number] for number in range(len(found))]


def _used(states: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Per port the numbers of the states in use, in order, and by candidate the position of its state among them."""
    pairs = [np.unique(each, return_inverse=True) for each in states]
    return [own for own, _ in pairs], [positions for _, positions in pairs]
