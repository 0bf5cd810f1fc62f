"""Clusters and meshes as a command line names them."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost.hardware.cluster import Cluster
from autopar.doors.predict import AXES
from autopar.errors import MeshError


def devices_of(spec: str) -> tuple[Cluster, int]:
    """The cluster of "h100:8", and how many devices. Raises `AutoparError` for one that nobody knows, and without a number."""
    cluster, number = Cluster.with_number(spec)
    if number is None:
        raise MeshError(f"--cluster {spec}: how many devices? Write {spec}:128")
    return cluster, number


def mesh_of(text: str, num_devices: int | None) -> dict[str, int]:
    """The axes of "dp=2,tp=4" in the order that plans have. Raises `MeshError`; also where they are not `num_devices` together."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name in sizes:
            raise MeshError(f"--mesh {text}: {name} is there twice")
        if not equals or not size.isdigit() or int(size) < 1:
            raise MeshError(f"--mesh {text}: {part.strip()!r} is no axis and its size; write dp=2,tp=4")
        sizes[name] = int(size)
    if unknown := [name for name in sizes if name not in AXES]:
        raise MeshError(f"--mesh {text}: the axes are {', '.join(AXES)}, not {unknown[0]}")
    number = size_of(sizes)
    if num_devices is not None and number != num_devices:
        others = number // sizes.get("dp", 1)
        fitting = f"with dp={num_devices // others} it would" if num_devices % others == 0 else f"take --cluster …:{number}"
        raise MeshError(f"--mesh {text} has {number} ranks, the cluster {num_devices} devices: they must be as many; {fitting}")
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def size_of(sizes: Mapping[str, int]) -> int:
    number = 1
    for size in sizes.values():
        number *= size
    return number
