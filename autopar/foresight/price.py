"""Seconds of what a rank does, from work, constants and a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.links import CommunicationKind, bytes_sent
from autopar.foresight.constants import Constants, SoftwareProfile
from autopar.foresight.work import Part
from autopar.ir.mesh import Mesh

# By what a profile says of its overlap: the collectives whose bytes move beside products of the weight gradient.
_SUMS: frozenset[CommunicationKind] = frozenset({"all_reduce", "reduce_scatter"})
HIDEABLE: dict[str, frozenset[CommunicationKind]] = {
    "": frozenset(),
    "sums": _SUMS,
    "all": frozenset({*_SUMS, "all_gather", "all_to_all"}),
}


@dataclass
class Seconds:
    """By what takes them: products, memory traffic with launches, collectives within the microbatch; and the CPU's, beside all three.
    `hideable` is what of the collectives may run beside products, as the profile says."""

    products: float = 0.0
    traffic: float = 0.0
    collectives: float = 0.0
    host: float = 0.0
    hideable: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.products + other.products,
            self.traffic + other.traffic,
            self.collectives + other.collectives,
            self.host + other.host,
            self.hideable + other.hideable,
        )

    @property
    def device(self) -> float:
        return self.products + self.traffic + self.collectives

    @property
    def total(self) -> float:
        return max(self.device, self.host)


@dataclass(frozen=True)
class Prices:
    """On the ranks of `mesh`, laid over the nodes of `cluster`; of its tp some transfers use sub-axes, of sizes `tp_parts`."""

    cluster: Cluster
    mesh: Mesh
    constants: Constants
    profile: SoftwareProfile
    tp_parts: tuple[int, ...] = ()
    _parts: dict[tuple[int, float], tuple[Part, Seconds]] = field(default_factory=dict[tuple[int, float], Any], repr=False)
    _routes: dict[tuple[str, ...], tuple[int, int, int]] = field(default_factory=dict[tuple[str, ...], tuple[int, int, int]], repr=False)

    def part(self, part: Part, samples: float) -> Seconds:
        """Of one microbatch of so many samples."""
        key = id(part), samples
        if key not in self._parts:
            self._parts[key] = part, self._priced(part, samples)  # with the part, so that no other gets its id
        return self._parts[key][1]

    def _priced(self, part: Part, samples: float) -> Seconds:
        constants, profile = self.constants, self.profile
        products = sum(
            each.flops.of(samples) / (constants.attention_flops if each.is_fused_attention else constants.product_flops)
            + each.bytes.of(samples) / constants.memory_bandwidth
            for each in part.products
        )
        is_fused = profile.pointwise == "fused"
        traffic = (part.fused_bytes if is_fused else part.eager_bytes).of(samples) / constants.memory_bandwidth
        kernels = (part.fused_kernels if is_fused else part.eager_kernels) + len(part.products)
        sizes: list[tuple[CommunicationKind, tuple[str, ...], float, float]] = [
            (each.collective, each.axes, each.input.of(samples), each.output.of(samples)) for each in part.transfers
        ]
        collectives = sum(starmap(self.collective, sizes))
        hideable = sum(self.moving_seconds(*each) for each in sizes if each[0] in HIDEABLE[profile.overlaps_tp])
        host = profile.host_seconds * (kernels + len(part.transfers)) + profile.collective_host_seconds * len(part.transfers)
        return Seconds(products, traffic + kernels * constants.launch_seconds, collectives, host, hideable)

    def collective(self, kind: CommunicationKind, axes: Sequence[str], num_input_bytes: float, num_output_bytes: float) -> float:
        """A ring over the ranks along `axes`, through as many adapters as a node has ranks of the group; a send goes to a neighbour.

        What starts it takes a step for each rank of a node and a level of a tree for each doubling of the nodes, as NCCL's trees.
        """
        num_ranks, num_nodes, _ = self._route(axes)
        if num_ranks == 1:
            return 0.0
        moving = self.moving_seconds(kind, axes, num_input_bytes, num_output_bytes)
        if kind == "send":
            return (self.constants.inner_latency if num_nodes == 1 else self.constants.outer_latency) + moving
        rounds = 2 if kind == "all_reduce" else 1
        steps = (num_ranks - num_nodes) * self.constants.inner_latency + math.log2(num_nodes) * self.constants.outer_latency
        return rounds * steps + moving

    def moving_seconds(self, kind: CommunicationKind, axes: Sequence[str], num_input_bytes: float, num_output_bytes: float) -> float:
        """What the bytes of a `collective` take, without what starts it."""
        num_ranks, num_nodes, ranks_on_node = self._route(axes)
        if num_ranks == 1:
            return 0.0
        inner, outer = self.constants.inner_bandwidth, self.constants.outer_bandwidth
        is_single = kind == "send" or ranks_on_node == 1
        bandwidth = inner if num_nodes == 1 else outer if is_single else min(inner, outer * ranks_on_node)
        return bytes_sent(kind, num_ranks, num_input_bytes, num_output_bytes) / bandwidth

    def _route(self, axes: Sequence[str]) -> tuple[int, int, int]:
        """Ranks along `axes`, the nodes that they lie on, and how many lie on one."""
        axes = tuple(axes)
        if axes not in self._routes:
            is_refined = not set(axes) <= set(self.mesh.names)
            route = self.cluster.route(self.mesh.refine("tp", self.tp_parts) if is_refined else self.mesh, axes)
            self._routes[axes] = route.num_ranks, route.num_nodes, route.ranks_on_node
        return self._routes[axes]

    def hidden_seconds(self, input_gradient: Seconds, weight_gradient: Seconds) -> float:
        """What of the collectives runs beside products, where both gradients are computed in one go."""
        return min(input_gradient.hideable, weight_gradient.products)

    def slowest_node_seconds(self) -> float:
        """What a step waits for the slowest of all nodes."""
        num_nodes = math.ceil(self.mesh.size / self.cluster.ranks_per_node)
        return self.profile.doubling_seconds * math.log2(num_nodes)
