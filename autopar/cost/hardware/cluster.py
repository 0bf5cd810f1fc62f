"""The hardware that a plan is made for: what one device does in a second, and what the links between devices carry.

Speeds are *achievable* ones (a large matmul, a long copy, a ring over all ranks), not the data sheet's. The built-in
clusters are the files of `autopar/cost/hardware/clusters`, each number with its source.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost.hardware.cluster_file import ClusterError, read_cluster
from autopar.cost.hardware.cluster_text import table_of, yaml_of
from autopar.cost.hardware.device import Device
from autopar.cost.hardware.host import Host
from autopar.cost.hardware.links import Link, Protocol, Route
from autopar.errors import MeshError
from autopar.ir.mesh import Mesh, parent

__all__ = ["Cluster", "ClusterError", "Device", "Host", "Link", "Protocol"]

# Where a cluster does not say how fast a device reaches what is not its memory.
USUAL_COPIES: dict[str, Link] = {
    "host": Link(10e-6, 25e9, "assumed: 16 lanes of PCIe 4"),
    "file": Link(100e-6, 3e9, "assumed: one NVMe drive over 4 lanes of PCIe 4, written"),
}


@dataclass(frozen=True)
class Cluster:
    """Equal devices, `ranks_per_node` to a node, joined by `inner` links within a node and `outer` ones between nodes.

    Ranks fill nodes in order, so the last mesh axes stay within a node. `links` overrides single mesh axes
    by the user's name (`tp`), as `autopar.calibrate` measures them; a group over several such axes is as fast as the slowest.
    """

    name: str
    device: Device
    inner: Link
    outer: Link
    ranks_per_node: int
    links: tuple[tuple[str, Link], ...] = ()
    # How fast the devices at each place on `pp` are, 1.0 for `device`; all alike where nothing is said.
    stage_speeds: tuple[float, ...] = ()
    # What joins a device to "host" memory, and to a "file": usual ones where nothing is said.
    copies: tuple[tuple[str, Link], ...] = ()

    def speed(self, place: int) -> float:
        """Of the devices at a place on `pp`, 1.0 for `device`."""
        return self.stage_speeds[place] if place < len(self.stage_speeds) else 1.0

    def copies_to(self, memory: str) -> Link:
        """The link by which a device reads and writes "host" memory, or a "file"."""
        return dict(self.copies).get(memory) or USUAL_COPIES[memory]

    @staticmethod
    def ideal() -> Cluster:
        """Links all but free, nothing to launch: whatever can be split is, and ties break towards fewer bytes."""
        device = Device("ideal", (("float64", 1e12), ("float32", 1e12), ("bfloat16", 1e12)), 1e15, 1e12, 0.0, "by definition")
        link = Link(0.0, 1e14, "by definition")
        return Cluster("ideal", device, link, link, 1, copies=(("host", link), ("file", link)))

    @staticmethod
    def named(name: str) -> Cluster:
        """A built-in cluster by name: `"8xH100"` (eight to a node), `"h100"`, `"4xa100-40gb"`, `"gb200"`, `"cpu"`, `"ideal"`.

        The name of a device as its driver reports it works too ("NVIDIA H100 80GB HBM3"), and so does the path of a
        YAML file (`from_yaml`). Raises `ClusterError` for a name that nobody knows, and for one with a number of devices ("h100:64"),
        which is for `with_number`.
        """
        if name.endswith((".yaml", ".yml")):
            return Cluster.from_yaml(name)
        front, colon, _ = name.rpartition(":")
        if colon:
            raise ClusterError(
                f"cluster={name!r}: no number of devices is taken here; write {front!r}. autopar.predict, autopar.rank_plans and the "
                "command line take one"
            )
        cluster = _known(name)
        if cluster is None:
            raise ClusterError(
                f"no numbers for {name!r}; known are {', '.join(built_in_names())}, ideal, or the path of a YAML file, which "
                "autopar.calibrate(mesh, path) measures and writes"
            )
        return cluster

    @staticmethod
    def with_number(spec: str) -> tuple[Cluster, int | None]:
        """The cluster of "h100:128", and how many devices; None where that is not said. Raises `ClusterError` as `named` does, and
        `MeshError` for what is no number."""
        name, colon, number = spec.rpartition(":")
        if not colon:
            return Cluster.named(spec), None
        if not number.isdecimal() or int(number) < 1:
            raise MeshError(f"cluster={spec!r}: {number!r} is no number of devices; write {name}:128")
        return Cluster.named(name), int(number)

    @staticmethod
    def of_device(name: str) -> Cluster:
        """The built-in cluster of a device by the name that its driver reports. One that has none warns, asks for numbers, and gets
        an A100's so that planning can go on."""
        cluster = _known(name)
        if cluster is not None:
            return cluster
        warnings.warn(
            f"no numbers for the device {name!r} (known: {', '.join(built_in_names())}, ideal); planning with an A100's. "
            "Pass cluster=Cluster(name, Device(...), inner=Link(...), outer=Link(...), ranks_per_node=...) with its own, "
            "or cluster=Cluster.from_yaml(path): autopar.calibrate(mesh, path) measures and writes that file, "
            "and Cluster.named('a100').to_yaml() shows what is in one.",
            stacklevel=2,
        )
        return replace(_built_in("a100"), name=name)

    @staticmethod
    def asked_for(cluster: Cluster | str | None, mesh: Mesh | DeviceMesh) -> Cluster:
        """What `cluster=` of `autopar.compile` means. By default virtual ranks get the ideal cluster, and real ones that of this device."""
        if isinstance(cluster, Cluster):
            return cluster
        if isinstance(cluster, str):
            return Cluster.named(cluster)
        if isinstance(mesh, Mesh):
            return Cluster.ideal()
        return Cluster.of_device(torch.cuda.get_device_name() if mesh.device_type == "cuda" else mesh.device_type)

    @staticmethod
    def from_yaml(path: str | Path) -> Cluster:
        """The cluster in the file `path`. Raises `ClusterError` naming every mistake with its line, or that there is no such file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"cannot read the cluster in {path}: {error.strerror}") from None
        return Cluster.from_text(text, str(path))

    @staticmethod
    def from_text(text: str, place: str = "the text") -> Cluster:
        """The cluster that the YAML `text` describes; `place` is what errors call it. Raises `ClusterError`."""
        content = read_cluster(text, place)
        device = content["device"]
        return Cluster(
            content["name"],
            Device(
                device.get("name", content["name"]),
                tuple(device["flops"].items()),
                device["memory"],
                device["memory_bandwidth"],
                device["launch"],
                device["source"],
                _host(device.get("host", {})),
            ),
            _link(content["inner"]),
            _link(content["outer"]),
            content["ranks_per_node"],
            tuple((axis, _link(link)) for axis, link in content.get("axes", {}).items()),
            copies=tuple((memory, _link(content[memory])) for memory in USUAL_COPIES if memory in content),
        )

    def to_yaml(self, path: str | Path | None = None) -> str:
        """This cluster as YAML that `from_text` reads back to an equal one; also written to `path`, where given."""
        text = yaml_of(self.name, self.device, self.ranks_per_node, self.inner, self.outer, self.links, self.copies)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return table_of(self.name, self.device, self.ranks_per_node, self.inner, self.outer, self.links)

    def link(self, mesh: Mesh, axes: tuple[str, ...]) -> Link:
        """The link that a group along `axes` of `mesh` is bound by."""
        route = self.route(mesh, axes)
        return route.outer if route.num_nodes > 1 else route.inner

    def route(self, mesh: Mesh, axes: tuple[str, ...]) -> Route:
        """What a group along `axes` of `mesh` communicates over; of groups that lie differently on their nodes, the worst."""
        sizes: dict[str, int] = {}
        for axis in axes:
            sizes[parent(axis)] = sizes.get(parent(axis), 1) * mesh.size_of((axis,))
        axis_sizes = tuple(sizes.values())
        overrides = dict(self.links)
        measured = [overrides[axis] for axis in sizes if axis in overrides]
        others = tuple(axis for axis in axes if parent(axis) not in overrides)
        num_nodes, ranks_on_node = _lie(mesh, others if measured else axes, self.ranks_per_node)
        if not measured:
            is_even = min(num_nodes, ranks_on_node) > 1 and num_nodes * ranks_on_node == mesh.size_of(axes)
            in_runs = is_even and _is_in_runs(mesh, axes, self.ranks_per_node)
            return Route(axis_sizes, num_nodes, ranks_on_node, self.inner, self.outer, in_runs)
        if others:
            measured.append(self.outer if num_nodes > 1 else self.inner)
        slowest = _slowest(measured)
        return Route(axis_sizes, 1, mesh.size_of(axes), slowest, slowest)


def built_in_names() -> tuple[str, ...]:
    """The names of the built-in clusters, `ideal` apart."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml")))


def _known(name: str) -> Cluster | None:
    """The cluster of such a name, with as many ranks to a node as it says in front of an x."""
    count, separator, rest = name.partition("x")
    has_count = bool(separator) and count.strip().isdigit()
    if has_count and int(count) < 1:
        raise ClusterError(f"cluster={name!r} has nodes of {count} devices: write how many are in one, 8x{rest.strip()}")
    wanted = (rest if has_count else name).lower().strip()
    if wanted == "ideal":
        return Cluster.ideal()
    cluster = built_in_for(wanted)
    return replace(cluster, name=name, ranks_per_node=int(count)) if cluster is not None and has_count else cluster


def _folder() -> Any:
    return resources.files("autopar.cost.hardware") / "clusters"


@cache
def _built_in(name: str) -> Cluster:
    return Cluster.from_text((_folder() / f"{name}.yaml").read_text(encoding="utf-8"), f"autopar/cost/hardware/clusters/{name}.yaml")


def built_in_for(device: str) -> Cluster | None:
    """The built-in cluster all of whose name's words begin a word of `device`, with no digit behind them ("h1000" is no "h100"); of
    several the one with most words (`a100-40gb`)."""
    words = device.lower()
    matches = [name for name in built_in_names() if all(re.search(rf"(?<![a-z0-9]){word}(?![0-9])", words) for word in name.split("-"))]
    return _built_in(max(matches, key=lambda name: (name.count("-"), len(name)))) if matches else None


def _host(content: dict[str, Any]) -> Host:
    numbers = {name: value for name, value in content.items() if name not in ("source", "update_bandwidth")}
    return Host(
        **{f"{name}_seconds": seconds for name, seconds in numbers.items()},
        update_bandwidth=content.get("update_bandwidth", 0.0),
        source=content.get("source", ""),
    )


def _link(content: dict[str, Any]) -> Link:
    protocols = {
        key: Protocol(content[key]["latency"], content[key]["bandwidth"]) if key in content else None for key in ("small", "in_switch")
    }
    return Link(
        content["latency"],
        content["bandwidth"],
        content["source"],
        content.get("call", 0.0),
        protocols["small"],
        protocols["in_switch"],
        content.get("wiring", "switch"),
        tuple(content.get("factors", {}).items()),
        content.get("busy", 0.0),
    )


def _slowest(links: list[Link]) -> Link:
    slowest = min(links, key=lambda link: link.bytes_per_second)
    return replace(
        slowest,
        latency_seconds=max(link.latency_seconds for link in links),
        call_seconds=max(link.call_seconds for link in links),
        busy=max(link.busy for link in links),
    )


def _nodes_of_groups(mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int) -> list[list[int]]:
    """Of each group along `axes` the nodes of its ranks, in the order of the axes."""
    strides, stride = dict[str, int](), 1
    for name, size in reversed(mesh.axes):
        strides[name] = stride
        stride *= size
    starts, offsets = [0], [0]
    for name, size in mesh.axes:
        if name not in axes:
            starts = [start + strides[name] * index for start in starts for index in range(size)]
    for name in axes:
        offsets = [offset + strides[name] * index for offset in offsets for index in range(mesh.size_of((name,)))]
    return [[(start + offset) // ranks_per_node for offset in offsets] for start in starts]


def _lie(mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int) -> tuple[int, int]:
    """On how many nodes the groups along `axes` lie at most, and how few ranks of a group share a node."""
    if mesh.size <= ranks_per_node:
        return 1, mesh.size_of(axes)
    groups = [Counter(nodes).values() for nodes in _nodes_of_groups(mesh, axes, ranks_per_node)]
    return max(len(group) for group in groups), min(min(group) for group in groups)


def _is_in_runs(mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int) -> bool:
    """Whether in each group along `axes` the ranks of a node are neighbours."""
    groups = _nodes_of_groups(mesh, axes, ranks_per_node)
    return all(sum(one != other for one, other in pairwise(nodes)) == len(set(nodes)) - 1 for nodes in groups)
