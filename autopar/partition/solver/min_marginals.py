"""Min-marginals: the least that a conversion costs by the state at one of its ports.

They are the inner step of the ascent, a few small array operations.

A conversion pays for a state once, however many readers need it. Where all its ports together have few combinations, their
costs are one table, which is exact. Else the least is put together of one part for each reader: exact for one shared state and
any number of states for one reader each. Values with four or more readers, which might share two, are bounded from below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.partition.solver.tables import NO_WAY, Array, Conversion

# Up to so many entries a table of all combinations is faster than parts.
_MAX_ENTRIES = 8192
# An array may have no more dims.
_MAX_PORTS = 32


class MarginalTable:
    """Costs of every combination of states. `min_marginals` are by the states of one port, without that port's own potentials."""

    def __init__(self, conversion: Conversion, own: Sequence[Array]) -> None:
        costs = _combined(conversion, own)
        # Per port its states by the combinations of all others; the longer dim is the inner one, for speed.
        by_port = [np.moveaxis(costs, port, 0).reshape(costs.shape[port], -1) for port in range(costs.ndim)]
        self._costs = [np.ascontiguousarray(each if each.shape[0] <= each.shape[1] else each.T) for each in by_port]
        self._is_turned = [each.shape[0] > each.shape[1] for each in by_port]

    def min_marginals(self, potentials: Sequence[Array], port: int) -> Array:
        others = [potential for number, potential in enumerate(potentials) if number != port]
        total = others[0]
        for potential in others[1:]:
            total = np.add.outer(total, potential).ravel()
        if self._is_turned[port]:
            return np.minimum.reduce(self._costs[port] + total[:, None], axis=0)
        return np.minimum.reduce(self._costs[port] + total, axis=1)


def _combined(conversion: Conversion, own: Sequence[Array]) -> Array:
    """Seconds by [state given, state that each reader needs]: all that is needed but what is cut from another needed state."""
    given, needed = own[0], own[1:]
    direct = np.minimum(conversion.price, conversion.cuts)[given]
    costs = np.zeros((len(given), *map(len, needed)))
    for reader, states in enumerate(needed):
        is_free = np.zeros((1, *map(len, needed)), dtype=bool)
        for other, others in enumerate(needed):
            if other != reader:
                is_same = others[:, None] == states
                cut = np.where(is_same, other < reader, conversion.slices[np.ix_(others, states)] == 0)
                is_free |= _along(cut if other < reader else cut.T, min(reader, other) + 1, max(reader, other) + 1, costs.ndim)
        costs += np.where(is_free, 0.0, _along(direct[:, states], 0, reader + 1, costs.ndim))
    return np.minimum(costs, NO_WAY)


def _along(matrix: Array, first: int, second: int, num_dims: int) -> Array:
    """`matrix` with its dims at two places, in this order, of `num_dims`."""
    return matrix.reshape([matrix.shape[0] if dim == first else matrix.shape[1] if dim == second else 1 for dim in range(num_dims)])


class Parts:
    """What each reader adds, put together; of each reader what its present potentials gave is kept."""

    def __init__(self, conversion: Conversion, own: Sequence[Array]) -> None:
        given, needed = own[0], own[1:]
        shared = np.unique(np.concatenate(needed))
        self._price = conversion.price[np.ix_(given, shared)]
        # Three readers share at most one state among them. More might share two: then nobody pays less than this part.
        self._alone_price = self._price / (len(needed) - 2 if len(needed) > 3 else 1)
        # Per reader 0 where it has a state for nothing: from what is given (the first rows), or from what is brought.
        self._free = [np.vstack((conversion.cuts[np.ix_(given, each)], conversion.slices[np.ix_(shared, each)])) for each in needed]
        self._known: list[tuple[Array, Array, Array] | None] = [None] * len(needed)

    def min_marginals(self, potentials: Sequence[Array], port: int) -> Array:
        given, apart, shared = potentials[0], 0.0, self._price
        for reader, own in enumerate(potentials[1:]):
            if reader + 1 != port:
                alone, together = self._part(reader, own)
                apart, shared = apart + alone, shared + together
        others = np.minimum(apart, np.minimum.reduce(shared, axis=1))
        if port == 0:
            return others
        given_too = given + others
        brought = np.minimum(
            np.minimum.reduce(shared + given[:, None], axis=0), np.minimum.reduce(self._alone_price + given_too[:, None], axis=0)
        )
        return np.minimum.reduce(self._free[port - 1] + np.concatenate((given_too, brought))[:, None], axis=0)

    def _part(self, reader: int, own: Array) -> tuple[Array, Array]:
        """What a reader costs by [state given] when it pays for itself, and by [state given, state brought] at best."""
        known = self._known[reader]
        if known is None or known[0] is not own:
            free = np.minimum.reduce(self._free[reader] + own, axis=1)
            num_given = len(self._price)
            brought = free[num_given:]
            alone = np.minimum(free[:num_given], np.minimum.reduce(self._alone_price + brought, axis=1))
            known = self._known[reader] = own, alone, np.minimum(alone[:, None], brought)
        return known[1], known[2]


def min_marginals_of(conversion: Conversion, own: Sequence[Array]) -> MarginalTable | Parts:
    """`own`: per port the numbers of the states that it may have, in order."""
    # Python's integers: those of an array wrap around, and 32 readers of 4 states each would be no combinations at all.
    is_small = len(own) == 2 or (len(own) <= _MAX_PORTS and math.prod(map(len, own)) <= _MAX_ENTRIES)
    return MarginalTable(conversion, own) if is_small else Parts(conversion, own)
