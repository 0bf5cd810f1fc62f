"""What people see of a cluster."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.hardware.cluster import Cluster, Device, Host
from autopar.cost.hardware.links import Link, Protocol

CLUSTER = Cluster(
    "mine",
    Device("chip", (("bfloat16", 7.95e14), ("float32", 6.7e13)), 80e9, 3.35e12, 4e-6, "a guess"),
    Link(3.4e-6, 365.2e9, call_seconds=26e-6, small=Protocol(6e-7, 260e9), in_switch=Protocol(25e-6, 270e9)),
    Link(14e-6, 47.7e9, factors=(("all_to_all", 1.5),)),
    8,
    (("tp", Link(1e-6, 1e9, wiring="mesh", busy=0.7)),),
)


def test_a_cluster_prints_as_a_table_with_units() -> None:
    assert str(CLUSTER).splitlines() == [
        "mine: 8 ranks per node of chip",
        "  matmul  bfloat16 795 TFLOP/s, float32 67 TFLOP/s",
        "  memory  80 GB at 3.35 TB/s",
        "  launch  4 us",
        "  link           per step  bandwidth  per call  small messages    in the switch    wiring  slower by       slows compute",
        "  within a node  3.4 us    365 GB/s   26 us     600 ns, 260 GB/s  25 us, 270 GB/s  switch  -               -",
        "  between nodes  14 us     47.7 GB/s  0 s       -                 -                switch  all_to_all 1.5  -",
        "  along tp       1 us      1 GB/s     0 s       -                 -                mesh    -               0.7",
    ]


def test_yaml_holds_exact_numbers_with_units() -> None:
    assert (
        replace(CLUSTER, links=()).to_yaml()
        == """\
name: mine
device:
  name: chip
  flops:
    bfloat16: 795 TFLOP/s
    float32: 67 TFLOP/s
  memory: 80 GB
  memory_bandwidth: 3.35 TB/s
  launch: 4 us
  source: "a guess"
ranks_per_node: 8
inner:
  latency: 3.4 us
  bandwidth: 365.2 GB/s
  call: 26 us
  small: {latency: 600 ns, bandwidth: 260 GB/s}
  in_switch: {latency: 25 us, bandwidth: 270 GB/s}
outer:
  latency: 14 us
  bandwidth: 47.7 GB/s
  factors: {all_to_all: 1.5}
"""
    )


def test_what_the_host_takes_is_read_back_and_shown() -> None:
    host = Host(2e-6, 2e-4, 25e-6, 5e-6, 12.5e9, "measured")
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, host=host))
    assert Cluster.from_text(cluster.to_yaml()) == cluster
    assert "  host    instruction 2 us, launch 200 us, parameter 25 us, update 5 us, updates at 12.5 GB/s" in str(cluster).splitlines()
    assert Cluster.from_text(CLUSTER.to_yaml()).device.host == Host(), "files from before say nothing of it"
