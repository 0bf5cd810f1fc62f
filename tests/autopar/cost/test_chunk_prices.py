"""Pieces save what a link carries while products run, and cost starts and copies."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.chunk_prices import alone, seconds_in_pieces, seconds_whole
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.links import Link
from autopar.cost.model import CostModel
from autopar.graph.chunk_sites import Site, sites
from autopar.ir.collectives import reduce_scatter
from autopar.ir.mesh import virtual_mesh
from tests.autopar.graph.test_chunk_sites import local_program


def a_sum() -> Site:
    return next(site for site in sites(local_program()) if site.launch.target is reduce_scatter)


def cost_of(bytes_per_second: float, latency_seconds: float = 1e-9, busy: float = 0.0) -> CostModel:
    """On a device that computes these few numbers for a while, starts kernels at once, and has no waves."""
    ideal = Cluster.ideal()
    device = replace(ideal.device, name="cpu", flops=(("float32", 1e6),), memory_bandwidth=1e15, launch_seconds=0.0)
    link = Link(latency_seconds, bytes_per_second, busy=busy)
    return CostModel(replace(ideal, device=device, inner=link, outer=link), virtual_mesh(tp=2))


def test_what_moves_beside_products_is_saved() -> None:
    site, cost = a_sum(), cost_of(1e6)
    in_two, in_four = (seconds_in_pieces(site, number, cost) for number in (2, 4))
    assert in_two is not None and in_four is not None and in_four < in_two < seconds_whole(site, cost)


def test_free_links_and_dear_starts_save_nothing() -> None:
    site = a_sum()
    for cost in (cost_of(1e18), cost_of(1e6, latency_seconds=10.0)):
        in_two = seconds_in_pieces(site, 2, cost)
        assert in_two is not None and in_two >= seconds_whole(site, cost)


def test_what_a_busy_link_takes_from_compute_is_not_saved() -> None:
    site = a_sum()
    free, busy = (seconds_in_pieces(site, 2, cost_of(1e6, busy=share)) for share in (0.0, 1.0))
    assert free is not None and busy is not None and free < busy
    assert busy >= seconds_whole(site, cost_of(1e6, busy=1.0))


def test_a_site_alone_is_given_what_it_reads() -> None:
    site = a_sum()
    graph, copy = alone(site)
    assert copy.launch.target is site.launch.target and len(copy.calls) == len(site.calls)
    assert {node.op for node in graph.nodes} == {"placeholder", "call_function", "output"}
    assert seconds_in_pieces(site, 5, cost_of(1e6)) is None
