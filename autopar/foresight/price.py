"""Seconds of what a rank does, from work, constants and a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.links import CommunicationKind, bytes_sent
from autopar.foresight.constants import Constants, SoftwareProfile
from autopar.foresight.work import Part
from autopar.ir.mesh import Mesh


@dataclass
class Seconds:
    """By what takes them: products, memory traffic with launches, collectives within the microbatch; and the CPU's, beside all three."""

    products: float = 0.0
    traffic: float = 0.0
    collectives: float = 0.0
    host: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.products + other.products, self.traffic + other.traffic, self.collectives + other.collectives, self.host + other.host
        )

    @property
    def device(self) -> float:
        return self.products + self.traffic + self.collectives

    @property
    def total(self) -> float:
        return max(self.device, self.host)


@dataclass(frozen=True)
class Prices:
    """On the ranks of `mesh`, laid over the nodes of `cluster`."""

    cluster: Cluster
    mesh: Mesh
    constants: Constants
    profile: SoftwareProfile
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
        collectives = sum(
            self.collective(each.collective, each.axes, each.input.of(samples), each.output.of(samples)) for each in part.transfers
        )
        host = profile.host_seconds * (kernels + len(part.transfers)) + profile.collective_host_seconds * len(part.transfers)
        return Seconds(products, traffic + kernels * constants.launch_seconds, collectives, host)

    def collective(self, kind: CommunicationKind, axes: Sequence[str], num_input_bytes: float, num_output_bytes: float) -> float:
        """A ring over the ranks along `axes`, through as many adapters as a node has ranks of the group; a send goes to a neighbour.

        What starts it takes a step for each rank of a node and a level of a tree for each doubling of the nodes, as NCCL's trees.
        """
        axes = tuple(axes)
        if axes not in self._routes:
            route = self.cluster.route(self.mesh, axes)
            self._routes[axes] = route.num_ranks, route.num_nodes, route.ranks_on_node
        num_ranks, num_nodes, ranks_on_node = self._routes[axes]
        if num_ranks == 1:
            return 0.0
        inner, outer = self.constants.inner_bandwidth, self.constants.outer_bandwidth
        sent = bytes_sent(kind, num_ranks, num_input_bytes, num_output_bytes)
        if kind == "send":
            is_near = num_nodes == 1
            return (self.constants.inner_latency if is_near else self.constants.outer_latency) + sent / (inner if is_near else outer)
        bandwidth = inner if num_nodes == 1 else outer if ranks_on_node == 1 else min(inner, outer * ranks_on_node)
        rounds = 2 if kind == "all_reduce" else 1
        steps = (num_ranks - num_nodes) * self.constants.inner_latency + math.log2(num_nodes) * self.constants.outer_latency
        return rounds * steps + sent / bandwidth

    def slowest_node_seconds(self) -> float:
        """What a step waits for the slowest of all nodes."""
        num_nodes = math.ceil(self.mesh.size / self.cluster.ranks_per_node)
        return self.profile.doubling_seconds * math.log2(num_nodes)
