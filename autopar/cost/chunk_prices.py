"""Seconds of a collective and the products beside it, whole or piece by piece, if nothing else hid the collective.

A walk over the calls in order, on two clocks: the rank computes, and the link carries one collective at a time. In pieces such a chain
takes its first transfer, then the longer of compute and transfers, then its last product; each piece pays a start, its kernels' launches,
its copies, and the tail of its products.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch.fx import Graph, Node

from autopar.cost.model import CostModel
from autopar.graph.chunk_sites import Site, axes_of
from autopar.graph.emit import tensor_of
from autopar.graph.pieces import PRODUCT, RESHAPES
from autopar.graph.write_chunks import write
from autopar.ir.arguments import node_at
from autopar.ir.collectives import LAUNCHES, is_launch, wait
from autopar.ir.instructions import Collective

# Elements of a product that a large GPU computes at a time: a tile of 128 × 256 on each of 132 multiprocessors (an H100). The last such
# wave of a product is half empty on average.
_WAVE_ELEMENTS = 132 * 128 * 256
_NAMES: dict[object, Collective] = dict(zip(LAUNCHES, ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"), strict=True))


def seconds_whole(site: Site, cost: CostModel) -> float:
    return _walk(alone(site)[0].nodes, site.axes, cost)


def seconds_in_pieces(site: Site, number: int, cost: CostModel) -> float | None:
    """None where its rows cannot be cut into so many."""
    graph, copy = alone(site)
    pieces = copy.pieces(number)
    if pieces is None:
        return None
    write(graph, copy, pieces)
    return _walk(graph.nodes, site.axes, cost)


def alone(site: Site) -> tuple[Graph, Site]:
    """A graph of nothing but `site`: what it reads is given, what others read of it is the result."""
    inside = sorted({*site.calls, site.wait})
    graph, copies = Graph(), dict[Node, Node]()
    for operand in dict.fromkeys(operand for node in inside for operand in node.all_input_nodes if operand not in inside):
        copies[operand] = graph.placeholder(operand.name)
        copies[operand].meta = dict(operand.meta)
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in inside if any(user not in inside for user in node.users)))
    return graph, Site(copies[site.launch], tuple(copies[node] for node in site.calls))


def _walk(nodes: Iterable[Node], axes: tuple[str, ...], cost: CostModel) -> float:
    now = link = carried = exposed = 0.0
    arrivals: dict[Node, float] = {}
    for node in nodes:
        if is_launch(node):
            seconds = _collective_seconds(node, cost)
            arrivals[node] = link = max(now, link) + seconds
            carried += seconds
            continue
        # As in a schedule, the first reader waits, not the `wait`; the result of the chain is read, too.
        late = max((arrivals[node_at(each, 0)] - now for each in node.all_input_nodes if each.target is wait), default=0.0)
        now, exposed = now + max(late, 0.0), exposed + max(late, 0.0)
        if node.op == "call_function" and node.target is not wait:
            now += _call_seconds(node, cost)
    return now + cost.cluster.link(cost.mesh.ranks, axes).busy * (carried - exposed)


def _collective_seconds(launch: Node, cost: CostModel) -> float:
    given, left = (float(tensor_of(each).nbytes) for each in (node_at(launch, 0), launch))
    return cost.collective(_NAMES[launch.target], axes_of(launch), given, left).seconds


def _call_seconds(node: Node, cost: CostModel) -> float:
    """As on the clock of the schedule, but for copies that views make, and the last wave of products."""
    seconds, value = cost.local(node).seconds, tensor_of(node)
    if node.target in RESHAPES and not _is_view(node):
        return cost.memory_seconds(2 * value.nbytes) + cost.cluster.device.launch_seconds
    if node.target is PRODUCT and cost.cluster.device.name != "cpu":
        return seconds * (1 + 0.5 * _WAVE_ELEMENTS / value.numel())
    return seconds


def _is_view(node: Node) -> bool:
    value = tensor_of(node_at(node, 0))
    return _can_view(tuple(value.shape), value.stride(), tuple(tensor_of(node).shape))


@lru_cache(maxsize=1024)
def _can_view(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of these strides is one of shape `wanted` as it lies. Layers ask alike; asking torch takes half a millisecond."""
    try:
        torch.empty_strided(shape, strides, device="meta").view(wanted)
    except (RuntimeError, ValueError):
        return False
    return True
