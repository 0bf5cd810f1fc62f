"""The hardware that a plan is made for: what one device does in a second, and what the links between devices carry.

Speeds are *achievable* ones (a large matmul, a long copy, a ring over all ranks), not the data sheet's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from autopar.mesh import Mesh, parent


@dataclass(frozen=True)
class Device:
    """One rank's device. `flops` lists (dtype name, FLOP/s); a dtype that is not listed runs at the slowest listed rate."""

    name: str
    flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second, read or written."""
    launch_seconds: float
    """What a kernel costs on top of its work."""
    source: str = ""

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """FLOP/s of contractions in `dtype`."""
        rates = dict(self.flops)
        return rates.get(str(dtype).removeprefix("torch."), min(rates.values()))


@dataclass(frozen=True)
class Link:
    """What joins the ranks of one group: seconds per step of a ring, and bytes per second per rank and direction."""

    latency_seconds: float
    bytes_per_second: float
    source: str = ""


@dataclass(frozen=True)
class Cluster:
    """Equal devices, `ranks_per_node` to a node, joined by `inner` links within a node and `outer` ones between nodes.

    Ranks fill nodes in order, so the last mesh axes stay within a node. `links` overrides single mesh axes
    by the user's name (`tp`). A group over several axes is as fast as the slowest of them.
    """

    name: str
    device: Device
    inner: Link
    outer: Link
    ranks_per_node: int
    links: tuple[tuple[str, Link], ...] = ()

    @staticmethod
    def ideal() -> Cluster:
        """Links all but free, nothing to launch: whatever can be split is, and ties break towards fewer bytes."""
        device = Device("ideal", (("float64", 1e12), ("float32", 1e12), ("bfloat16", 1e12)), 1e15, 1e12, 0.0, "by definition")
        link = Link(0.0, 1e14, "by definition")
        return Cluster("ideal", device, link, link, 1)

    @staticmethod
    def named(name: str) -> Cluster:
        """A built-in cluster by name: `"8xH100"` (eight to a node, the default), `"h100"`, `"4xa100"`, `"cpu"`, `"ideal"`.

        The name of a device as its driver reports it works too ("NVIDIA H100 80GB HBM3"). An unknown name
        warns, asks for numbers, and gives the numbers of an A100 so that planning can go on.
        """
        count, separator, rest = name.partition("x")
        has_count = bool(separator) and count.strip().isdigit()
        wanted = (rest if has_count else name).lower()
        if wanted.strip() == "ideal":
            return Cluster.ideal()
        for key, cluster in _BUILT_IN.items():
            if key in wanted:
                return replace(cluster, name=name, ranks_per_node=int(count)) if has_count else cluster
        warnings.warn(
            f"no numbers for the device {name!r} (known: {', '.join(_BUILT_IN)}, ideal); planning with an A100's. "
            "Pass cluster=Cluster(name, Device(...), inner=Link(...), outer=Link(...), ranks_per_node=...) with its own.",
            stacklevel=2,
        )
        return replace(_BUILT_IN["a100"], name=name)

    def link(self, mesh: Mesh, axes: tuple[str, ...]) -> Link:
        """The link that a group along `axes` of `mesh` is bound by."""
        links = [self._link_of_axis(mesh, axis) for axis in axes]
        slowest = min(links, key=lambda link: link.bytes_per_second)
        return replace(slowest, latency_seconds=max(link.latency_seconds for link in links))

    def _link_of_axis(self, mesh: Mesh, axis: str) -> Link:
        overrides = dict(self.links)
        if parent(axis) in overrides:
            return overrides[parent(axis)]
        position = mesh.names.index(axis)
        span = mesh.size_of(mesh.names[position:])
        return self.inner if span <= self.ranks_per_node else self.outer


_GPU_NOTES = "github:stas00/ml-engineering@744d01e"
_NCCL_STEP = "latency: the floor of a measured 8-rank all-reduce over its 14 ring steps; "


def _gpu(name: str, flops: float, vector_flops: float, memory_gb: float, memory: float, inner: Link, outer: Link) -> Cluster:
    rates = (("bfloat16", flops), ("float16", flops), ("float32", vector_flops), ("float64", vector_flops / 2))
    # 4 µs: what a kernel costs when launches overlap (3.4–3.8 µs with CUDA graphs or one stream, 9.6 µs with a synchronise each).
    device = Device(name, rates, memory_gb * 1e9, memory, 4e-6, f"matmul: best measured shape; memory: data sheet ({_GPU_NOTES})")
    return Cluster(name, device, inner, outer, 8)


_BUILT_IN: dict[str, Cluster] = {
    "a100": _gpu(
        "a100", 271e12, 19.5e12, 80, 2.039e12,
        Link(3.1e-6, 235e9, _NCCL_STEP + f"bandwidth: 16 GiB all-reduce ({_GPU_NOTES})"),
        Link(14e-6, 18e9, "NCCL tuner, Ring Simple over NET; 72 % of 25 GB/s"),
    ),
    "h100": _gpu(
        "h100", 795e12, 67e12, 80, 3.35e12,
        Link(2.7e-6, 361e9, _NCCL_STEP + f"bandwidth: ring all-gather ({_GPU_NOTES})"),
        Link(14e-6, 36e9, "NCCL tuner, Ring Simple over NET; 72 % of 50 GB/s"),
    ),
    "h200": _gpu(
        "h200", 795e12, 67e12, 141, 4.8e12,
        Link(2.7e-6, 361e9, _NCCL_STEP + f"bandwidth: ring all-gather ({_GPU_NOTES})"),
        Link(14e-6, 36e9, "NCCL tuner, Ring Simple over NET; 72 % of 50 GB/s"),
    ),
    "b200": _gpu(
        "b200", 1745e12, 75e12, 180, 8e12,
        Link(2.7e-6, 720e9, f"80 % of 900 GB/s, as NVLink 4 reaches ({_GPU_NOTES})"),
        Link(14e-6, 36e9, "NCCL tuner, Ring Simple over NET; 72 % of 50 GB/s"),
    ),
    # Ranks as processes of one machine over gloo: 1.4 GB/s per rank and 50 µs a call, measured on 2 ranks of 1 core each.
    "cpu": Cluster(
        "cpu",
        Device("cpu", (("float32", 25e9), ("float64", 14e9), ("bfloat16", 70e9)), 8e9, 14e9, 5e-6, "one core, 1024³ matmul, 64 MB copy"),
        Link(25e-6, 1.4e9, "gloo all-reduce of 100 MB on 2 ranks, torch 2.13"),
        Link(50e-6, 1.0e9, "assumed: 10 Gb/s Ethernet"),
        1_000,
    ),
}  # fmt: skip
