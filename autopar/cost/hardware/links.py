"""What a message costs on the way between ranks: latency, bandwidth, and how both depend on its size.

    seconds = call + min over algorithms and protocols of (steps · α + bytes sent / β)

α–β with a ring is the simplest case: a `Link` of two numbers. The rest is what NCCL adds, each part with a meaning:
a protocol for small messages (flags in the data: low α, low β), all-reduces inside the switch (each rank sends its
data once), trees between nodes (latency grows with the logarithm of the nodes), and several nodes, whose ranks all
use their own adapters at once. Source of the structure: github:NVIDIA/nccl src/graph/tuning.cc; of α–β over rings:
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

CommunicationKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COMMUNICATION_KINDS: tuple[CommunicationKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
Wiring = Literal["switch", "mesh", "torus"]
WIRINGS: tuple[Wiring, ...] = ("switch", "mesh", "torus")
# A torus has three dims; an all-to-all along a ring of n passes n / 4 links on average, both ways round.
_TORUS_DIMS = 3
_TORUS_HOPS = 4


@dataclass(frozen=True)
class Protocol:
    """One way to drive a link: seconds per step, and bytes per second per rank and direction."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Link:
    """What joins the ranks of one group: seconds per step of a ring, and bytes per second per rank and direction.

    call_seconds  what every collective costs, whatever its size and the number of ranks
    small         the protocol for small messages: less latency, less bandwidth
    in_switch     all-reduces added up inside the switch: two steps, every rank sends its bytes once
    wiring        `switch`: a rank's whole bandwidth reaches any peer. `mesh`: every pair has a wire of
                  `bytes_per_second`, so a rank's bandwidth grows with the group. `torus`: each mesh axis has a ring of wires.
    factors       how many times as long as here the library's own way takes, for single collectives
    busy          the share of a collective's time that it takes from what the rank computes meanwhile: 0 where another engine moves the
                  bytes, towards 1 where the same core does
    """

    latency_seconds: float
    bytes_per_second: float
    source: str = field(default="", repr=False)
    call_seconds: float = 0.0
    small: Protocol | None = None
    in_switch: Protocol | None = None
    wiring: Wiring = "switch"
    factors: tuple[tuple[CommunicationKind, float], ...] = ()
    busy: float = 0.0

    @property
    def bulk(self) -> Protocol:
        return Protocol(self.latency_seconds, self.bytes_per_second)


@dataclass(frozen=True)
class Route:
    """What a group of ranks communicates over.

    `axis_sizes` are the sizes of its mesh axes. The group lies on `num_nodes` nodes, on one of them with as few as
    `ranks_on_node` of its ranks. `inner` joins ranks of a node, `outer` the nodes, where there are several. `in_runs`: on each node
    are equally many, and they are neighbours in the group; False where the link over an axis was measured, whatever it is made of.
    """

    axis_sizes: tuple[int, ...]
    num_nodes: int
    ranks_on_node: int
    inner: Link
    outer: Link
    in_runs: bool = False

    @property
    def num_ranks(self) -> int:
        return math.prod(self.axis_sizes)


def bytes_sent(transfer: CommunicationKind, num_ranks: int, num_input_bytes: float, num_output_bytes: float) -> float:
    """Bytes that one of `num_ranks` sends in a ring; the sizes are the collective's local input and output."""
    if transfer == "send":
        return num_input_bytes
    share = (num_ranks - 1) / num_ranks
    if transfer == "all_reduce":
        return 2 * share * num_input_bytes
    if transfer == "all_gather":
        return share * num_output_bytes
    return share * num_input_bytes


def transfer_seconds(transfer: CommunicationKind, route: Route, num_input_bytes: float, num_output_bytes: float) -> float:
    """Seconds of one collective (or of a send to a neighbour) on `route`; the sizes are its local input and output in bytes.

    Never falls when the bytes grow. Kernel launches are the caller's.
    """
    if route.num_ranks == 1:
        return 0.0
    sent = bytes_sent(transfer, route.num_ranks, num_input_bytes, num_output_bytes)
    ways = [_ring(transfer, route, sent, small=False)]
    if route.inner.small or route.outer.small:
        ways.append(_ring(transfer, route, sent, small=True))
    if transfer == "all_reduce":
        ways += _other_all_reduces(route, num_input_bytes)
    crossed = route.outer if route.num_nodes > 1 else route.inner
    return dict(crossed.factors).get(transfer, 1.0) * (crossed.call_seconds + min(ways))


def by_node_seconds(transfer: CommunicationKind, route: Route, num_input_bytes: float, num_output_bytes: float) -> float:
    """Seconds of a gather between nodes, each rank with those in its place on others, and then within nodes; of a scatter the other way
    round. Every byte moves as often as in one ring, in fewer steps. Infinite for other collectives, and where ranks do not lie so."""
    if transfer not in ("all_gather", "reduce_scatter") or not route.in_runs or min(route.num_nodes, route.ranks_on_node) == 1:
        return math.inf
    across = replace(route, axis_sizes=(route.num_nodes,), ranks_on_node=1)
    within = replace(route, axis_sizes=(route.ranks_on_node,), num_nodes=1)
    between = min(num_input_bytes, num_output_bytes) * route.num_nodes
    if transfer == "all_gather":
        return transfer_seconds(transfer, across, num_input_bytes, between) + transfer_seconds(transfer, within, between, num_output_bytes)
    return transfer_seconds(transfer, within, num_input_bytes, between) + transfer_seconds(transfer, across, between, num_output_bytes)


def _ring(transfer: CommunicationKind, route: Route, sent: float, small: bool) -> float:
    inner, outer = _protocols(route, small)
    if transfer == "send":
        used = outer if route.num_nodes > 1 else inner
        return used.latency_seconds + sent / used.bytes_per_second
    rounds = 2 if transfer == "all_reduce" else 1
    num_outer = route.num_nodes - 1
    latency = (_ring_steps(route) - num_outer) * inner.latency_seconds + num_outer * outer.latency_seconds
    if transfer == "all_to_all":
        return latency + _all_to_all_seconds(route, sent, inner, outer)
    return rounds * latency + sent / _ring_bandwidth(route, inner, outer)


def _protocols(route: Route, small: bool) -> tuple[Protocol, Protocol]:
    inner, outer = route.inner, route.outer
    return (inner.small or inner.bulk, outer.small or outer.bulk) if small else (inner.bulk, outer.bulk)


def _ring_steps(route: Route) -> int:
    """Steps of one round; on a torus the axes are done one after the other."""
    if route.inner.wiring == "torus":
        return max(sum(size - 1 for size in route.axis_sizes), route.num_nodes - 1)
    return route.num_ranks - 1


def _wires(route: Route) -> int:
    """How many of its wires a rank uses at once within a node."""
    if route.inner.wiring == "mesh":
        return max(route.ranks_on_node - 1, 1)
    if route.inner.wiring == "torus":
        return min(sum(size > 1 for size in route.axis_sizes), _TORUS_DIMS)
    return 1


def _ring_bandwidth(route: Route, inner: Protocol, outer: Protocol) -> float:
    """Rings through all nodes, as many as a node has ranks of the group: each crosses by an adapter of its own."""
    within = inner.bytes_per_second * _wires(route)
    if route.num_nodes == 1:
        return within
    between = outer.bytes_per_second * route.ranks_on_node
    return between if route.ranks_on_node == 1 else min(within, between)


def _all_to_all_seconds(route: Route, sent: float, inner: Protocol, outer: Protocol) -> float:
    """The part for other nodes leaves through the rank's one adapter, the rest beside it over the links of the node."""
    peers = route.num_ranks - 1
    near = min(route.ranks_on_node - 1, peers) if route.num_nodes > 1 else peers
    hops = max(1.0, max(route.axis_sizes) / _TORUS_HOPS) if route.inner.wiring == "torus" else 1.0
    within = sent * near / peers * hops / (inner.bytes_per_second * _wires(route))
    return max(within, sent * (peers - near) / peers / outer.bytes_per_second)


def _other_all_reduces(route: Route, num_bytes: float) -> list[float]:
    """Inside the switch of one node, or over a tree of several nodes."""
    if route.num_nodes == 1:
        switch = route.inner.in_switch
        return [2 * switch.latency_seconds + num_bytes / switch.bytes_per_second] if switch else []
    return [_tree(route, num_bytes, small) for small in (False, True)]


def _tree(route: Route, num_bytes: float, small: bool) -> float:
    """Up and down two binary trees over the nodes, each with half of the bytes, and a chain inside each node.

    Every node sends all bytes twice in all: up once, and down once for each of its children, of which it has one on average.
    """
    inner, outer = _protocols(route, small)
    depth = math.ceil(math.log2(route.num_nodes))
    latency = (route.ranks_on_node - 1) * inner.latency_seconds + depth * outer.latency_seconds
    return 2 * latency + 2 * num_bytes / _ring_bandwidth(route, inner, outer)
