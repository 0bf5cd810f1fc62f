"""Built-in hardware, and which link a group of ranks is bound by."""

from __future__ import annotations

import csv
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cost.hardware.cluster import Cluster, ClusterError, Link, built_in_names
from autopar.cost.hardware.links import Protocol
from autopar.errors import MeshError
from autopar.ir.mesh import Mesh, virtual_mesh


@pytest.mark.parametrize(
    ("name", "device", "per_node"),
    [
        ("h100", "h100", 8),
        ("8xH100", "h100", 8),
        ("4 x a100", "a100", 4),
        ("NVIDIA H100 80GB HBM3", "h100", 8),
        ("NVIDIA H200", "h200", 8),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 8),
        ("NVIDIA A100-SXM4-80GB", "a100", 8),
        ("Tesla V100-SXM2-32GB", "v100", 16),
        ("NVIDIA B200", "b200", 8),
        ("NVIDIA GB200", "gb200", 72),
        ("AMD Instinct MI300X", "mi300x", 8),
        ("tpu", "tpu", 8960),
        ("cpu", "cpu", 1000),
    ],
)
def test_named_finds_the_device_and_the_ranks_of_a_node(name: str, device: str, per_node: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster = Cluster.named(name)
    assert cluster.device.name == device
    assert cluster.ranks_per_node == per_node


def test_an_unknown_device_warns_and_asks_for_numbers() -> None:
    with pytest.warns(UserWarning, match=r"no numbers for the device 'Warp 9'.*Pass cluster=Cluster\(.*from_yaml\(path\).*calibrate"):
        cluster = Cluster.of_device("Warp 9")
    assert cluster.name == "Warp 9"
    assert cluster.device == Cluster.named("a100").device


@pytest.mark.parametrize("name", ["h1000", "8xh1000", "foo", "", "8x"])
def test_a_name_that_nobody_knows_is_refused(name: str) -> None:
    with pytest.raises(
        ClusterError, match=f"no numbers for '{name}'; known are a100, a100-40gb, b200, cpu, .*ideal, or the path of a YAML"
    ):
        Cluster.named(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h100:64", "no number of devices is taken here; write 'h100'"),
        ("0xh100", "has nodes of 0 devices: write how many are in one, 8xh100"),
    ],
)
def test_numbers_that_a_name_does_not_take_are_refused(name: str, text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        Cluster.named(name)


def test_a_cluster_with_its_number_of_devices() -> None:
    assert Cluster.with_number("8xh100:64") == (Cluster.named("8xh100"), 64) and Cluster.with_number("cpu") == (Cluster.named("cpu"), None)
    for spec in ("h100:0", "h100:many", "h100:", "h100:-8"):
        with pytest.raises(MeshError, match="is no number of devices; write h100:128"):
            Cluster.with_number(spec)


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


def test_groups_that_lie_unevenly_on_nodes_are_as_bad_as_the_worst() -> None:
    cluster = replace(Cluster.named("h100"), ranks_per_node=3)
    # Of six ranks three share a node: pairs (0, 1) and (4, 5) do, (2, 3) do not.
    route = cluster.route(virtual_mesh(dp=3, tp=2), ("tp",))
    assert (route.num_nodes, route.ranks_on_node) == (2, 1)
    route = cluster.route(virtual_mesh(dp=2, tp=3), ("tp",))
    assert (route.num_nodes, route.ranks_on_node) == (1, 3)


def test_a_group_has_as_many_ranks_on_a_node_as_the_axes_inside_leave() -> None:
    cluster, mesh = Cluster.named("8xH100"), virtual_mesh(dp=16, tp=4)
    assert [
        (cluster.route(mesh, axes).num_nodes, cluster.route(mesh, axes).ranks_on_node) for axes in (("dp",), ("tp",), ("dp", "tp"))
    ] == [
        (8, 2),
        (1, 4),
        (8, 8),
    ]


def test_a_group_over_a_measured_axis_and_another_is_as_fast_as_the_slower() -> None:
    slow = Link(1e-3, 1e6, call_seconds=1.0)
    cluster = replace(Cluster.named("8xh100"), links=(("tp", slow),))
    link = cluster.link(virtual_mesh(dp=4, tp=8), ("dp", "tp"))
    assert (link.bytes_per_second, link.latency_seconds, link.call_seconds) == (1e6, 1e-3, 1.0)


@pytest.mark.parametrize("name", [*built_in_names(), "ideal"])
def test_a_cluster_reads_back_from_its_yaml(name: str, tmp_path: Path) -> None:
    cluster = Cluster.named(name)
    assert Cluster.from_text(cluster.to_yaml()) == cluster
    own = replace(cluster, name="my: own", links=(("tp", Link(0.1 + 0.2, 1e9 / 3, "é", 1e-7, Protocol(0.0, 7.0), wiring="mesh")),))
    text = own.to_yaml(tmp_path / "own.yaml")
    assert (tmp_path / "own.yaml").read_text(encoding="utf-8") == text
    assert Cluster.from_yaml(tmp_path / "own.yaml") == own == Cluster.named(str(tmp_path / "own.yaml"))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ClusterError, match=r"cannot read the cluster in nowhere.yaml: No such file"):
        Cluster.from_yaml("nowhere.yaml")


@pytest.mark.parametrize("name", [name for name in built_in_names() if name != "cpu"])
def test_every_number_of_a_built_in_cluster_names_its_source(name: str) -> None:
    cluster = Cluster.named(name)
    keys = [f"flops.{dtype}" for dtype, _ in cluster.device.flops] + ["memory", "memory_bandwidth", "launch"]
    assert [key for key in keys if f"{key}: " not in cluster.device.source] == []
    for link in (cluster.inner, cluster.outer):
        keys = ["latency", "bandwidth", "call"] + [f"{part}.bandwidth" for part in ("small", "in_switch") if getattr(link, part)]
        assert [key for key in keys if f"{key}: " not in link.source] == []


def published(table: str) -> list[dict[str, str]]:
    with (Path(__file__).parents[4] / "benchmarks" / "published" / f"{table}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [("a100", "A100 SXM"), ("h100", "H100 SXM"), ("b200", "NVIDIA B200 SXM"), ("gb200", "GB200 SXM"), ("mi300x", "MI300X")],
)
def test_matmul_runs_as_fast_as_was_published(name: str, accelerator: str) -> None:
    (row,) = [row for row in published("matmul_mamf") if accelerator in row["accelerator"] and row["dtype"] == "bf16"]
    assert Cluster.named(name).device.flops_per_second(torch.bfloat16) == pytest.approx(
        float(row["achieved_tflops_best_shape"]) * 1e12, rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [("v100", "V100-32GB"), ("a100", "A100-80GB"), ("a100-40gb", "A100-40GB"), ("h100", "H100-80GB"), ("h200", "H200"), ("b200", "B200")]
    + [("gb200", "GB200"), ("tpu", "TPU v5p")],
)
def test_nothing_is_faster_than_its_data_sheet(name: str, accelerator: str) -> None:
    (row,) = [row for row in published("hardware") if row["accelerator"].startswith(accelerator)]
    cluster = Cluster.named(name)
    assert cluster.device.memory_bytes == float(row["hbm_GB"]) * 1e9
    assert 0.85 < cluster.device.memory_bandwidth / (float(row["hbm_GBps"]) * 1e9) < 0.95
    assert max(rate for _, rate in cluster.device.flops) < float(row["peak_bf16_fp16_tflops_dense"]) * 1e12
    if row["scaleup_GBps_per_direction"]:
        assert 0.7 < cluster.inner.bytes_per_second / (float(row["scaleup_GBps_per_direction"]) * 1e9) < 0.9
