"""Lower bounds for an assignment problem, and the assignment they point at: block-coordinate ascent on the dual.

Every node and every transport of a value has potentials; what a potential takes from one it gives to another, so the
cost of every assignment stays what it was, while the sum of all minima, a lower bound, only rises. Nodes are visited in
order, forwards and backwards: each collects what its transports would cost it, candidate by candidate, and hands on shares
to those ahead (sequential reweighted message passing: V. Kolmogorov, "A New Look at Reweighted Message Passing", PAMI 2015).

A transport pays for a state once, however many readers need it: the exact minimum over one shared state and any number of
states for one reader each. Values with four or more readers, which might share two, are bounded from below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from autopar.solver.tables import IS_NO_WAY, NO_WAY, Array, Tables, Transport


class _Port:
    """A transport as seen from one node: the potentials of all its ports are shared with the transport's other ports."""

    def __init__(self, transport: Transport, potentials: list[Array], port: int) -> None:
        self.transport = transport
        self.potentials = potentials
        self.port = port
        self.states = transport.states[port]
        self._direct = np.minimum(transport.price, transport.cuts)
        self.last = max(transport.nodes)
        self.first = min(transport.nodes)

    def least(self) -> Array:
        """For each state at this port the least that the transport costs with it, potentials included."""
        if len(self.potentials) == 2:
            return self._least_of_one_reader()
        return self._least_of_many_readers()

    def _least_of_one_reader(self) -> Array:
        if self.port == 0:
            return self.potentials[0] + (self._direct + self.potentials[1]).min(1)
        return self.potentials[1] + (self._direct + self.potentials[0][:, None]).min(0)

    def _least_of_many_readers(self) -> Array:
        given, price, cuts, slices = self.potentials[0], self.transport.price, self.transport.cuts, self.transport.slices
        num_readers = len(self.potentials) - 1
        # Three readers share at most one state among them. More might share two: then nobody pays less than this part.
        alone_price = price / (num_readers - 2 if num_readers > 3 else 1)
        shared, apart = price, np.zeros(len(given))
        for reader in range(1, num_readers + 1):
            if reader == self.port:
                continue
            own = self.potentials[reader]
            from_shared = (own + slices).min(1)
            alone = np.minimum((own + cuts).min(1), (alone_price + from_shared).min(1))
            shared = shared + np.minimum(alone[:, None], from_shared)
            apart = apart + alone
        others = np.minimum(apart, shared.min(1))
        if self.port == 0:
            return given + others
        from_given = (given + others)[:, None]
        from_brought = np.minimum((given[:, None] + shared).min(0), (from_given + alone_price).min(0))
        return self.potentials[self.port] + np.minimum((from_given + cuts).min(0), (from_brought[:, None] + slices).min(0))


class Ascent:
    """The dual of `tables`. `sweep` raises `bound`; `assignment` reads off an answer."""

    def __init__(self, tables: Tables) -> None:
        self.nodes = [seconds.copy() for seconds in tables.seconds]
        self._constant = 0.0
        self._ports: list[list[_Port]] = [[] for _ in self.nodes]
        self._transports: list[_Port] = []
        for transport in tables.transports:
            sizes = [transport.price.shape[0], *[transport.price.shape[1]] * (len(transport.nodes) - 1)]
            potentials = [np.zeros(size) for size in sizes]
            ports = [_Port(transport, potentials, port) for port in range(len(transport.nodes))]
            for port, node in zip(ports, transport.nodes, strict=True):
                self._ports[node].append(port)
            self._transports.append(ports[0])

    def bound(self) -> float:
        """No assignment costs less."""
        return (
            self._constant + sum(float(node.min()) for node in self.nodes) + sum(float(first.least().min()) for first in self._transports)
        )

    def sweep(self, forwards: bool) -> None:
        """Visit every node once."""
        order = range(len(self.nodes)) if forwards else reversed(range(len(self.nodes)))
        for number in order:
            self.collect(number)
            self.hand_on(number, forwards)

    def collect(self, number: int) -> Array:
        """Take from its transports what they cost this node; its potentials are then how much dearer each candidate is than the best."""
        potentials = self.nodes[number]
        for port in self._ports[number]:
            least = port.least()
            dead = least > IS_NO_WAY
            least[dead] = NO_WAY
            port.potentials[port.port] = np.where(dead, NO_WAY, port.potentials[port.port] - least)
            potentials = np.minimum(potentials + least[port.states], NO_WAY)
        lowest = float(potentials.min())
        self._constant += lowest
        self.nodes[number] = potentials - lowest
        return self.nodes[number]

    def hand_on(self, number: int, forwards: bool) -> None:
        """Give to the transports that lead on, each an equal share of what the node holds."""
        ports = self._ports[number]
        ahead = [port for port in ports if (port.last > number if forwards else port.first < number)]
        shares = max(len(ahead), len(ports) - len(ahead))
        potentials = self.nodes[number]
        for port in ahead:
            given = np.full(len(port.potentials[port.port]), NO_WAY)
            np.minimum.at(given, port.states, potentials)
            dead = given > IS_NO_WAY
            given = np.where(dead, 0.0, given / shares)
            port.potentials[port.port] = np.where(dead, NO_WAY, port.potentials[port.port] + given)
            potentials = potentials - given[port.states]
            shares -= 1
        self.nodes[number] = potentials

    def add(self, prices: Sequence[Array]) -> None:
        """Make every candidate dearer (or cheaper) by so much."""
        self.nodes = [np.minimum(node + price, NO_WAY) for node, price in zip(self.nodes, prices, strict=True)]

    def forbid(self, number: int, candidates: Array) -> None:
        """Take candidates (a boolean mask) of a class out of the running."""
        self.nodes[number] = np.where(candidates, NO_WAY, self.nodes[number])

    def assignment(self, order: Iterable[int]) -> list[int]:
        """A candidate for every class: one class after the other takes its best, given what those before it took."""
        kept = [[potential.copy() for potential in first.potentials] for first in self._transports]
        picks = [0] * len(self.nodes)
        for number in order:
            potentials = self.nodes[number]
            for port in self._ports[number]:
                potentials = potentials + np.minimum(port.least(), NO_WAY)[port.states]
            picks[number] = int(np.argmin(potentials))
            for port in self._ports[number]:
                state = port.states[picks[number]]
                only = np.full(len(port.potentials[port.port]), NO_WAY)
                only[state] = port.potentials[port.port][state]
                port.potentials[port.port] = only
        for first, potentials in zip(self._transports, kept, strict=True):
            first.potentials[:] = potentials
        return picks

    def assignments(self) -> tuple[list[int], list[int]]:
        """From the first class on, and from the last."""
        order = range(len(self.nodes))
        return self.assignment(order), self.assignment(reversed(order))
