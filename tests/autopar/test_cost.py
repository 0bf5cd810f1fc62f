"""Prices against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx import Graph, Node

import autopar.rules  # noqa: F401  (registers the rules whose FLOPs are priced)
from autopar.cluster import Cluster, Device, Link
from autopar.cost import CostModel, bytes_sent, is_view
from autopar.keys import DIMS
from autopar.mesh import Mesh, virtual_mesh
from autopar.sharding import Sharding, Strategy

# One FLOP and one byte of memory take a second, a byte on the wire two, a step of a ring 1000, a kernel 1e6.
DEVICE = Device("unit", (("float32", 1.0),), 1e9, 1.0, 1e6)
CLUSTER = Cluster("unit", DEVICE, Link(1e3, 0.5), Link(1e3, 0.5), 1000)
MESH = Mesh((("dp", 1), ("tp", 4)))
WHOLE, ROWS, COLUMNS = Sharding(((), ())), Sharding((("tp",), ())), Sharding(((), ("tp",)))
UNREDUCED = Sharding(((), ()), (("tp", "sum"),))


def model() -> CostModel:
    return CostModel(CLUSTER, MESH)


@pytest.mark.parametrize(
    ("collective", "sizes", "sent", "num_steps"),
    [
        ("all_reduce", (400, 400), 600, 6),
        ("all_gather", (100, 400), 300, 3),
        ("reduce_scatter", (400, 100), 300, 3),
        ("all_to_all", (400, 400), 300, 3),
    ],
)
def test_a_ring_sends_its_bytes_in_its_steps(collective: str, sizes: tuple[int, int], sent: float, num_steps: int) -> None:
    assert bytes_sent(collective, 4, *sizes) == sent  # type: ignore[arg-type]
    cost = model().collective(collective, ("tp",), *sizes)  # type: ignore[arg-type]
    assert cost.bytes == sent
    assert cost.seconds == num_steps * 1e3 + sent / 0.5 + 1e6


def test_a_group_of_one_sends_nothing() -> None:
    assert model().collective("all_reduce", ("dp",), 400, 400).seconds == 0


def test_reduce_scatter_and_all_gather_together_send_what_an_all_reduce_does() -> None:
    dims = ((8,), (16,))
    scatter, gather, reduce = (
        model().reshard(dims, 4, source, target) for source, target in ((UNREDUCED, ROWS), (ROWS, WHOLE), (UNREDUCED, WHOLE))
    )
    assert scatter.bytes + gather.bytes == reduce.bytes == 2 * 3 / 4 * 8 * 16 * 4


def test_slices_are_free_and_becoming_unreduced_is_impossible() -> None:
    dims = ((8,), (16,))
    assert model().reshard(dims, 4, WHOLE, COLUMNS).seconds == 0
    assert model().reshard(dims, 4, WHOLE, UNREDUCED).seconds == math.inf


def matmul(m: int = 8, k: int = 16, n: int = 32) -> Node:
    graph = Graph()
    values = [graph.placeholder("x"), graph.placeholder("w")]
    for node, shape in zip(values, ((m, k), (k, n)), strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
        DIMS[node] = (tuple((size,) for size in shape),)
    product = graph.call_function(torch.ops.aten.mm.default, tuple(values))
    product.meta["val"] = torch.empty(m, n, device="meta")
    DIMS[product] = (((m,), (n,)),)
    return product


def test_a_matmul_costs_its_flops_its_bytes_and_a_launch() -> None:
    node = matmul()
    whole = model().node(node, Strategy((WHOLE, WHOLE), (WHOLE,)))
    assert whole.seconds == 2 * 8 * 16 * 32 + 4 * (8 * 16 + 16 * 32 + 8 * 32) + 1e6
    columns = model().node(node, Strategy((WHOLE, COLUMNS), (COLUMNS,), num_shards=4))
    assert columns.seconds == 2 * 8 * 16 * 8 + 4 * (8 * 16 + 16 * 8 + 8 * 8) + 1e6


def test_views_are_all_but_free_and_smaller_ones_cheaper() -> None:
    source = matmul()
    view = source.graph.call_function(torch.ops.aten.t.default, (source,))
    view.meta["val"] = torch.empty(32, 8, device="meta")
    DIMS[view] = (((32,), (8,)),)
    assert is_view(view) and not is_view(source)
    whole = model().node(view, Strategy((WHOLE,), (WHOLE,))).seconds
    split = model().node(view, Strategy((ROWS,), (COLUMNS,), num_shards=4)).seconds
    assert split == whole / 4
    assert 0 < whole < 0.01 * 4 * (2 * 8 * 32)


def test_a_parameter_is_priced_by_the_bytes_a_rank_holds() -> None:
    dims = ((8,), (16,))
    assert model().parameter(dims, torch.float32, WHOLE).seconds == 7 * 8 * 16 * 4
    assert model().parameter(dims, torch.float32, ROWS).seconds == 7 * 2 * 16 * 4
    assert model().parameter(dims, torch.float32, WHOLE, trainable=False).seconds == 8 * 16 * 4


def test_the_measured_all_reduce_of_eight_h200_is_met_within_a_third() -> None:
    prices = CostModel(Cluster.named("8xh200"), virtual_mesh(tp=8))
    # nccl-tests, 8×H200: bytes and the algorithmic bandwidth in GB/s.
    for size, bandwidth in ((64 << 10, 1.67), (1 << 20, 22.82), (16 << 20, 125.65), (1 << 30, 264.9)):
        assert prices.collective("all_reduce", ("tp",), size, size).seconds == pytest.approx(size / (bandwidth * 1e9), rel=0.34)
