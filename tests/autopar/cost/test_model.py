"""Prices against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx import Graph, Node

import autopar.ops.rules  # noqa: F401  (registers the rules whose FLOPs are priced)
from autopar.cost.hardware.cluster import Cluster, Device, Link
from autopar.cost.hardware.links import bytes_sent
from autopar.cost.model import Cost, CostModel, is_view
from autopar.ir.keys import DIMS
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.reshard import steps
from autopar.ir.sharding import Sharding, Strategy

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
        ("send", (400, 400), 400, 1),
    ],
)
def test_a_ring_sends_its_bytes_in_its_steps(collective: str, sizes: tuple[int, int], sent: float, num_steps: int) -> None:
    assert bytes_sent(collective, 4, *sizes) == sent  # type: ignore[arg-type]
    cost = model().collective(collective, ("tp",), *sizes)  # type: ignore[arg-type]
    assert cost.bytes == sent
    assert cost.seconds == num_steps * 1e3 + sent / 0.5 + 1e6


def test_a_group_of_one_sends_nothing() -> None:
    assert model().collective("all_reduce", ("dp",), 400, 400).seconds == 0


def test_reduce_scatter_and_all_gather_together_cost_what_an_all_reduce_does_but_for_the_launch() -> None:
    scatter, gather, reduce = (
        model().reshard(8 * 16 * 4, source, target) for source, target in ((UNREDUCED, ROWS), (ROWS, WHOLE), (UNREDUCED, WHOLE))
    )
    assert scatter + gather - 1e6 == reduce


@pytest.mark.parametrize("target", [ROWS, WHOLE])
def test_a_reshard_costs_what_its_steps_do(target: Sharding) -> None:
    cost = model()
    found = sum(cost.step(step, 4).seconds for step in steps(((8,), (16,)), UNREDUCED, target, cost.mesh))
    assert cost.reshard(8 * 16 * 4, UNREDUCED, target) == found > 0


def test_slices_are_free_and_becoming_unreduced_is_impossible() -> None:
    assert model().reshard(8 * 16 * 4, WHOLE, COLUMNS) == 0
    assert model().reshard(8 * 16 * 4, WHOLE, UNREDUCED) == math.inf


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


def test_a_group_over_several_nodes_uses_all_their_adapters() -> None:
    prices, size = CostModel(Cluster.named("8xh100"), virtual_mesh(dp=2, tp=8)), 1 << 30
    across, alone = prices.collective("all_reduce", ("dp", "tp"), size, size), prices.collective("all_reduce", ("dp",), size, size)
    assert across.bytes > alone.bytes
    assert across.seconds < alone.seconds / 3


def test_steps_between_microbatches_are_free() -> None:
    mesh = Mesh((("tp", 4), ("mb", 8)))
    cost = CostModel(CLUSTER, mesh)
    dims = ((64,), (32,))
    over_time = Sharding(((), ()), (("mb", "sum"),))
    (step,) = steps(dims, over_time, WHOLE, mesh)
    assert cost.step(step, 4) == Cost(0.0)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_of_a_step_over_ranks_and_microbatches_the_ranks_are_priced(collective: str) -> None:
    mesh = Mesh((("tp", 4), ("mb", 8)))
    both, own = ({"tp": "sum", "mb": "sum"}, {"tp": "sum"})
    ends = {
        "all_reduce": (Sharding(((), ()), tuple(both.items())), WHOLE, Sharding(((), ()), tuple(own.items())), WHOLE),
        "all_gather": (Sharding((("tp", "mb"), ())), WHOLE, Sharding((("tp",), ())), WHOLE),
        "reduce_scatter": (
            Sharding(((), ()), tuple(both.items())),
            Sharding((("tp", "mb"), ())),
            Sharding(((), ()), tuple(own.items())),
            Sharding((("tp",), ())),
        ),
    }[collective]
    (step,), (alone,) = steps(((64,), (32,)), *ends[:2], mesh), steps(((64,), (32,)), *ends[2:], mesh)
    assert step.collective == alone.collective == collective and set(step.axes) == {"tp", "mb"}
    priced, expected = CostModel(CLUSTER, mesh).step(step, 4), CostModel(CLUSTER, mesh).step(alone, 4)
    scale = step.num_input / alone.num_input
    assert priced.bytes == pytest.approx(expected.bytes * scale) and priced.bytes > 0
