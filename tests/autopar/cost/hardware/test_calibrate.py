"""Measuring the machine of the tests: that every number is there and usable, and the same on all ranks. Not how large it is."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar.cost.hardware.calibrate as measuring
from autopar.cost.hardware.calibrate import cluster_of
from autopar.cost.hardware.cluster import Cluster, Device, Host
from autopar.cost.hardware.kept import FOLDER
from autopar.cost.hardware.link_fit import Sample
from autopar.cost.hardware.links import Link, Route, transfer_seconds
from autopar.cost.model import CostModel
from autopar.errors import MeshError
from autopar.ir.mesh import virtual_mesh

DTYPES = ["bfloat16", "float32", "float64"]


def test_one_process_measures_its_device_and_says_what_it_did_not_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))  # reports of other tests do not read it
    cluster = measuring.calibrate(path=tmp_path / "here.yaml", measure_host=lambda: Host(parameter_seconds=2e-5))
    assert Cluster.from_yaml(tmp_path / "here.yaml") == cluster
    assert [dtype for dtype, rate in cluster.device.flops if rate > 1e6] == DTYPES
    assert cluster.device.memory_bandwidth > 1e6 and cluster.device.memory_bytes > 1e6
    assert 0 < cluster.device.launch_seconds < 1e-2
    assert cluster.device.source.startswith("measured by autopar.cost.hardware.calibrate")
    assert cluster.inner.source == "not measured: as in the built-in cluster cpu"
    assert cluster.inner.bytes_per_second == Cluster.named("cpu").inner.bytes_per_second
    assert cluster.links == ()
    host = cluster.device.host
    assert host.parameter_seconds == 2e-5 and host.launch_seconds == 0 and host.update_bandwidth > 1e6


def test_virtual_ranks_have_no_links() -> None:
    with pytest.raises(MeshError, match=r"the ranks of the mesh \(dp=2 × tp=2\) are virtual and have no links to measure"):
        measuring.calibrate(virtual_mesh(dp=2, tp=2))


def samples_of(link: Link, num_ranks: int) -> list[Sample]:
    route = Route((num_ranks,), 1, num_ranks, link, link)
    return [
        Sample(transfer, num_ranks, size, size, transfer_seconds(transfer, route, size, size))
        for transfer in ("all_reduce", "all_to_all")
        for size in (1e4, 1e6, 1e8)
    ]


def test_axes_that_leave_the_node_give_the_link_between_nodes() -> None:
    device = Device("NVIDIA H100 80GB HBM3", (("bfloat16", 8e14),), 80e9, 3e12, 4e-6)
    near, far = Link(1e-6, 100e9), Link(1e-5, 10e9)
    # Nodes of four ranks: pp leaves them with one rank of a group on each.
    samples = {"pp": samples_of(far, 2), "tp": samples_of(near, 2)}
    cluster = cluster_of(device, samples, virtual_mesh(pp=2, dp=2, tp=2), ["a"] * 4 + ["b"] * 4)
    assert cluster.ranks_per_node == 4
    assert cluster.inner.bytes_per_second == pytest.approx(100e9, rel=1e-3)
    assert cluster.outer.bytes_per_second == pytest.approx(10e9, rel=1e-3)
    assert [axis for axis, _ in cluster.links] == ["pp", "tp"]
    # Nodes of two, each whole in a group of four: both of its ranks send out at once.
    world = cluster_of(device, {"world": samples_of(replace(far, bytes_per_second=20e9), 4)}, None, ["a", "a", "b", "b"])
    assert world.outer.bytes_per_second == pytest.approx(10e9, rel=1e-3)
    assert world.links == () and world.inner.source == "not measured: as in the built-in cluster h100"


def calibrated(path: str) -> tuple[Cluster, str]:
    """The cluster, and what calibrate says to a mesh of a part of the world."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setenv(FOLDER, str(Path(path).parent))
        measuring._ON_CPU = replace(measuring._ON_CPU, matmul=(64, 128), copy_bytes=1 << 20, messages=((4 << 10, 2), (64 << 10, 2)))
        patch.setattr(measuring, "_NUM_COLLECTIVES", 3)
        cluster = measuring.calibrate(mesh, path)
    with pytest.raises(MeshError) as raised:
        measuring.calibrate(DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",)))
    dist.barrier()
    return cluster, str(raised.value)


def test_ranks_measure_their_links_and_agree(gloo_ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "gloo.yaml"
    clusters, refusals = zip(*gloo_ranks.run(calibrated, str(path)), strict=True)
    cluster = Cluster.from_yaml(path)
    assert list(clusters) == [cluster] * 4
    assert cluster.ranks_per_node == 4
    assert [dtype for dtype, rate in cluster.device.flops if rate > 1e6] == DTYPES
    assert [(axis, link.source) for axis, link in cluster.links] == [
        ("dp", "measured by autopar.cost.hardware.calibrate along dp"),
        ("tp", "measured by autopar.cost.hardware.calibrate along tp"),
    ]
    assert cluster.inner.source == "measured by autopar.cost.hardware.calibrate within a node"
    assert cluster.outer.source.startswith("not measured")
    assert 0 < cluster.device.host.launch_seconds < 1
    assert all(0 <= link.busy <= 1 for _, link in cluster.links) and cluster.inner.busy == max(link.busy for _, link in cluster.links)
    prices = CostModel(cluster, virtual_mesh(dp=2, tp=2))
    for axes in (("dp",), ("tp",), ("dp", "tp")):
        few, many = (prices.collective("all_reduce", axes, size, size).seconds for size in (1 << 10, 1 << 28))
        assert 0 < few < many
    assert set(refusals) == {"the mesh (tp=2) has 2 ranks, the world 4; calibrate needs all on it"}
