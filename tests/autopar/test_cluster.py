"""Built-in hardware, and which link a group of ranks is bound by."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from autopar.cluster import Cluster, Link
from autopar.mesh import Mesh, virtual_mesh


@pytest.mark.parametrize(
    ("name", "device", "per_node"),
    [("h100", "h100", 8), ("8xH100", "h100", 8), ("4 x a100", "a100", 4), ("NVIDIA H100 80GB HBM3", "h100", 8), ("cpu", "cpu", 1000)],
)
def test_named_finds_the_device_and_the_ranks_of_a_node(name: str, device: str, per_node: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster = Cluster.named(name)
    assert cluster.device.name == device
    assert cluster.ranks_per_node == per_node


def test_an_unknown_device_warns_and_asks_for_numbers() -> None:
    with pytest.warns(UserWarning, match=r"no numbers for the device 'Warp 9'.*Pass cluster=Cluster\("):
        cluster = Cluster.named("Warp 9")
    assert cluster.name == "Warp 9"
    assert cluster.device == Cluster.named("a100").device


def test_groups_within_a_node_use_inner_links_and_others_outer_ones() -> None:
    cluster = Cluster.named("8xH100")
    mesh = virtual_mesh(dp=4, tp=8)
    assert cluster.link(mesh, ("tp",)) == cluster.inner
    assert cluster.link(mesh, ("dp",)) == cluster.outer
    assert cluster.link(mesh, ("dp", "tp")).bytes_per_second == cluster.outer.bytes_per_second
    small = virtual_mesh(dp=2, tp=4)
    assert cluster.link(small, ("dp",)) == cluster.inner


def test_an_axis_may_have_a_link_of_its_own_and_its_sub_axes_share_it() -> None:
    slow = Link(1e-3, 1e6)
    cluster = replace(Cluster.named("h100"), links=(("tp", slow),))
    mesh = Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 2)))
    assert cluster.link(mesh, ("tp.1",)) == slow
    assert cluster.link(mesh, ("dp",)) == cluster.inner


def test_a_dtype_without_a_rate_runs_at_the_slowest() -> None:
    device = Cluster.named("h100").device
    assert device.flops_per_second(torch.bfloat16) == 795e12
    assert device.flops_per_second(torch.int64) == min(rate for _, rate in device.flops)


def test_ideal_links_are_all_but_free() -> None:
    cluster = Cluster.ideal()
    assert cluster.device.launch_seconds == 0
    assert 0 < 1 / cluster.inner.bytes_per_second <= 1e-2 / cluster.device.memory_bandwidth
    assert Cluster.named("ideal") == cluster
