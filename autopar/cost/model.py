"""Seconds and bytes of what a rank does. One model for all passes.

    node        FLOPs / rate + bytes read and written / bandwidth + launch
    collective  steps · α + bytes sent / β + launch          (α–β, rings; what else there is: `autopar.cost.hardware.links`)
    parameter   what the optimizer reads and writes / bandwidth      (an update: / the optimizer's own, + a call)

Compute and memory time are *added*, where a roofline takes the larger. The sum is at most twice the roofline, and
it has no plateaus: a split that saves memory traffic of a compute-bound op is still worth something, as it is in
truth (power, caches, the tail of the kernel).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.device import UPDATE_PASSES
from autopar.cost.hardware.links import CommunicationKind, Route, by_node_seconds, bytes_sent, transfer_seconds
from autopar.cost.memory import OptimizerKind
from autopar.ir.instructions import Memory
from autopar.ir.keys import DIMS
from autopar.ir.markers import MARKERS
from autopar.ir.mesh import MICROBATCHES, Mesh
from autopar.ir.program import operands, results_of
from autopar.ir.reshard import Move, ReshardStep, moves, reachable
from autopar.ir.sharding import Dims, Sharding, Strategy, flat
from autopar.ops.atoms import operand_result
from autopar.ops.lookup import registered_rule, rule_of

# Ops that describe memory anew and move none of it.
_VIEWS = frozenset(
    "alias detach expand getitem narrow permute reshape select slice squeeze t transpose unsqueeze view _unsafe_view".split()
)
# A frozen parameter costs one read: enough to break ties towards splitting it.
KEEP_PASSES = 1
# What mixes microbatches is no collective but another meaning of the program (each microbatch for itself): as dear as it takes
# to be the last resort.
MIXING_SECONDS = 1.0
# A send so large that its latency is lost in it.
_LARGE_BYTES = 2.0**30
# The share of its traffic that a view is charged: it breaks ties towards small local values, which are what stays saved.
_VIEW_SHARE = 1e-3


@dataclass(frozen=True)
class Cost:
    """Seconds on one rank and bytes that it sends."""

    seconds: float
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes)


def is_mixing(move: Move, known_ahead: bool) -> bool:
    """Whether a step of a reshard joins what the network made of several microbatches."""
    return MICROBATCHES in move.axes and move.collective != "slice" and not (known_ahead and move.collective == "all_reduce")


def is_view(node: Node) -> bool:
    """Whether `node` costs nothing to run."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return node.target in MARKERS or getattr(packet, "__name__", str(packet)) in _VIEWS


class CostModel:
    """Prices on the ranks of `mesh`, laid over the devices and links of `cluster`. `optimizer` says what state a parameter has."""

    def __init__(self, cluster: Cluster, mesh: Mesh, optimizer: OptimizerKind | None = None) -> None:
        self.cluster = cluster
        self.optimizer = optimizer or OptimizerKind()
        self.mesh = mesh
        # Strategies of a thousand nodes ask for the same few hundred collectives.
        self._transfers: dict[tuple[CommunicationKind, tuple[str, ...], float, float], float] = {}
        self._shards: dict[Sharding, int] = {}
        self._routes: dict[tuple[str, ...], Route] = {}

    def compute_seconds(self, flops: float, dtype: torch.dtype) -> float:
        return flops / self.cluster.device.flops_per_second(dtype)

    def memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / self.cluster.device.memory_bandwidth

    def node(self, node: Node, strategy: Strategy) -> Cost:
        """`node` under `strategy`. Reads DIMS of the node and of its operands."""
        num_bytes = self.traffic_bytes(node, strategy)
        if is_view(node):
            return Cost(_VIEW_SHARE * self.memory_seconds(num_bytes))
        rule = rule_of(node)
        flops = rule.flops / strategy.num_shards if rule else 0.0
        seconds = self.compute_seconds(flops, _dtype_of(node)) + self.memory_seconds(num_bytes)
        return Cost(seconds + self.cluster.device.launch_seconds)

    def local(self, node: Node) -> Cost:
        """A call of a LOCAL graph, or of a fragment of one, as it stands: its values have local shapes. As `node` in formula."""
        values = {operand: value for operand in node.all_input_nodes for value in results_of(operand)[:1]}
        total = float(sum(value.nbytes for value in (*values.values(), *results_of(node)) if value is not None))
        if is_view(node):
            return Cost(_VIEW_SHARE * self.memory_seconds(total))
        return Cost(self.local_contraction(node) + self.memory_seconds(total) + self.cluster.device.launch_seconds)

    def local_contraction(self, node: Node) -> float:
        """Of the seconds of `local` those of FLOPs."""
        rule = registered_rule(node)  # of a contraction; what has none has no FLOPs that count
        return self.compute_seconds(rule.flops, _dtype_of(node)) if rule else 0.0

    def traffic_bytes(self, node: Node, strategy: Strategy) -> float:
        """Bytes that one rank reads and writes: local operands (each value once) and local results."""
        total = 0.0
        seen: set[tuple[Node, Sharding]] = set()
        for operand, sharding in zip(operands(node), strategy.operands, strict=True):
            result = operand_result(node, operand)
            value = results_of(operand)[result]
            if value is not None and (operand, sharding) not in seen:
                seen.add((operand, sharding))
                total += self.local_bytes(DIMS[operand][result], value.dtype, sharding)
        for dims, value, sharding in zip(DIMS[node], results_of(node), strategy.results, strict=True):
            if value is not None:
                total += self.local_bytes(dims, value.dtype, sharding)
        return total

    def local_bytes(self, dims: Dims, dtype: torch.dtype, sharding: Sharding) -> float:
        """Bytes of one rank's part of a value."""
        return math.prod(flat(dims)) * dtype.itemsize / self._num_shards(sharding)

    def _num_shards(self, sharding: Sharding) -> int:
        """In how many parts a value lies on the mesh."""
        if sharding not in self._shards:
            self._shards[sharding] = math.prod(self.mesh.size_of(split) for split in sharding.splits)
        return self._shards[sharding]

    def collective(self, collective: CommunicationKind, axes: Sequence[str], num_input_bytes: float, num_output_bytes: float) -> Cost:
        """One collective over the ranks along `axes` (a send: between neighbours); the sizes are its local input and output in bytes."""
        route = self._route(tuple(axes))
        if route.num_ranks == 1:
            return Cost(0.0)
        seconds = transfer_seconds(collective, route, num_input_bytes, num_output_bytes)
        sent = bytes_sent(collective, route.num_ranks, num_input_bytes, num_output_bytes)
        return Cost(seconds + self.cluster.device.launch_seconds, sent)

    def by_node(self, collective: CommunicationKind, axes: Sequence[str], num_input_bytes: float, num_output_bytes: float) -> float:
        """Seconds of one that goes by node: two launches, and a copy that puts it in order. Infinite where there is no such way."""
        moving = by_node_seconds(collective, self._route(tuple(axes)), num_input_bytes, num_output_bytes)
        return moving + 2 * self.memory_seconds(max(num_input_bytes, num_output_bytes)) + 2 * self.cluster.device.launch_seconds

    def node_size(self, collective: CommunicationKind, axes: Sequence[str], num_input_bytes: float, num_output_bytes: float) -> int:
        """How many neighbours along `axes` are on a node, where such a collective is quicker by node; 0 where it is not."""
        sizes = num_input_bytes, num_output_bytes
        is_quicker = self.by_node(collective, axes, *sizes) < self.collective(collective, axes, *sizes).seconds
        return self._route(tuple(axes)).ranks_on_node if is_quicker else 0

    def _route(self, axes: tuple[str, ...]) -> Route:
        if axes not in self._routes:
            self._routes[axes] = self.cluster.route(self.mesh.ranks, axes)
        return self._routes[axes]

    def _transfer_seconds(self, *transfer: *tuple[CommunicationKind, tuple[str, ...], float, float]) -> float:
        if transfer not in self._transfers:
            self._transfers[transfer] = self.collective(*transfer).seconds
        return self._transfers[transfer]

    def busy(self, axes: Sequence[str]) -> float:
        """The share of a rank's device that collectives along `axes` take from what computes meanwhile."""
        across = tuple(axis for axis in axes if axis != MICROBATCHES)
        return self.cluster.link(self.mesh.ranks, across).busy if across else 0.0

    def send(self) -> tuple[float, float]:
        """Seconds of an empty send to the next stage of a pipeline, and seconds a byte."""
        if not self.mesh.parts("pp"):
            return 0.0, 0.0
        empty = self.collective("send", self.mesh.parts("pp"), 0.0, 0.0).seconds
        large = self.collective("send", self.mesh.parts("pp"), _LARGE_BYTES, _LARGE_BYTES).seconds
        return empty, max(large - empty, 0.0) / _LARGE_BYTES

    def copy_seconds(self, memory: Memory, num_bytes: float) -> float:
        """To host memory or a file, or back."""
        link = self.cluster.copies_to(memory)
        return link.call_seconds + link.latency_seconds + num_bytes / link.bytes_per_second

    def step(self, step: ReshardStep, itemsize: int) -> Cost:
        """One step of a reshard of a value whose elements have `itemsize` bytes. Slices are free.

        So is what joins microbatches: they run on the same rank. Of a step over `mb` and other axes those alone are priced.
        """
        axes = tuple(axis for axis in step.axes if axis != MICROBATCHES)
        if step.collective == "slice" or not axes:
            return Cost(0.0)
        num_output = step.num_output
        if axes != step.axes and step.collective in ("all_gather", "reduce_scatter"):
            share = self.mesh.size_of(axes)
            num_output = step.num_input * share if step.collective == "all_gather" else step.num_input // share
        return self.collective(step.collective, axes, step.num_input * itemsize, num_output * itemsize)

    def reshard(self, num_bytes: float, source: Sharding, target: Sharding, known_ahead: bool = False) -> float:
        """Seconds of a change of sharding of a value of `num_bytes` in all: the sum of its steps, infinite where there is no way.

        A value that is `known_ahead` of the microbatches is reduced over them once, for nothing.
        """
        if not reachable(source, target):
            return math.inf
        total = 0.0
        here = num_bytes / self._num_shards(source)
        for move in moves(source, target):
            size = self.mesh.size_of(move.axes)
            there = {"all_gather": here * size, "slice": here / size, "reduce_scatter": here / size}.get(move.collective, here)
            if move.collective != "slice":
                axes = tuple(axis for axis in move.axes if axis != MICROBATCHES)
                total += MIXING_SECONDS * is_mixing(move, known_ahead)
                total += self._transfer_seconds(move.collective, axes, here, there) if axes else 0.0
            here = here if move.kind == "logsumexp" else there
        return total

    def parameter(self, dims: Dims, dtype: torch.dtype, sharding: Sharding, trainable: bool = True) -> Cost:
        """What holding a parameter costs a step: the optimizer's passes over this rank's part of it and of its state.

        It is also the price of memory: the update is paid per byte held, so of two equal plans the one that holds less wins.
        """
        passes = UPDATE_PASSES if trainable else KEEP_PASSES
        return Cost(passes * self.memory_seconds(self.local_bytes(dims, dtype, sharding)))

    def update(self, dims: Dims, dtype: torch.dtype, sharding: Sharding, trainable: bool = True) -> float:
        """Seconds of a parameter's update: what it passes over, as quickly as optimizers do, and what one more tensor costs them."""
        seconds, device = self.parameter(dims, dtype, sharding, trainable).seconds, self.cluster.device
        if not trainable:
            return seconds
        return seconds * device.memory_bandwidth / (device.host.update_bandwidth or device.memory_bandwidth) + device.host.update_seconds


def _dtype_of(node: Node) -> torch.dtype:
    """The dtype a contraction multiplies in: its first tensor operand's."""
    for operand in operands(node):
        value = results_of(operand)[operand_result(node, operand)]
        if value is not None and value.dtype.is_floating_point:
            return value.dtype
    return torch.float32
