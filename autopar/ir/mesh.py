"""The logical mesh: named axes over ranks, outermost first.

A `Mesh` says nothing of devices. Passing one to `autopar.compile` means virtual ranks in
this process; a torch `DeviceMesh` means real ones, and `Mesh.of` describes it in these words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import MeshError

RESERVED_AXES = ("pp", "dp", "cp", "ep", "tp")
# The one axis of a flat mesh: ranks of which nobody has said what they share.
FLAT = "world"
# The axis in time: microbatches, one after another on the same ranks. It is the last of a mesh, and no user's axis.
MICROBATCHES = "mb"


@dataclass(frozen=True)
class Mesh:
    """Named axes with their sizes; rank order is row-major, the last axis varies fastest.

    `refine` breaks an axis into sub-axes named `tp.0`, `tp.1`, … (major first), so that four
    tensor-parallel ranks can split two heads on one sub-axis and something else on the other.
    """

    axes: tuple[tuple[str, int], ...]
    _products: dict[tuple[str, ...], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise MeshError(f"mesh axes must have distinct names, got {names}")
        # Searches ask for the same few products a million times.
        object.__setattr__(self, "_products", dict[tuple[str, ...], int]())
        for name, size in self.axes:
            if size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size}; every axis needs at least 1 rank")

    @staticmethod
    def of(mesh: Any) -> Mesh:
        """Describe `mesh`, a `Mesh` or a torch `DeviceMesh` with named axes."""
        if isinstance(mesh, Mesh):
            return mesh
        names = getattr(mesh, "mesh_dim_names", None)
        if not names:
            raise MeshError(
                f"the mesh needs named axes, got {mesh!r}; "
                'use init_device_mesh(..., mesh_dim_names=("dp", "tp")) or autopar.virtual_mesh(dp=2, tp=2)'
            )
        return Mesh(tuple(zip(names, (int(size) for size in mesh.mesh.shape), strict=True)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size_of(self, axes: Sequence[str]) -> int:
        """Number of ranks along `axes` together; 1 for none."""
        key = tuple(axes)
        if key not in self._products:
            sizes = dict(self.axes)
            self._products[key] = math.prod(sizes[axis] for axis in key)
        return self._products[key]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Position of `rank` within its group along `axes`, the first axis major."""
        if not axes:
            return 0
        at, sizes, index = self.coordinates(rank), dict(self.axes), 0
        for axis in axes:
            index = index * sizes[axis] + at[axis]
        return index

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axes` only, ordered by `index`."""
        at, sizes = self.coordinates(rank), dict(self.axes)
        members = []
        for index in range(self.size_of(axes)):
            here = dict(at)
            for axis in reversed(axes):
                index, here[axis] = divmod(index, sizes[axis])
            members.append(self.rank_at(here))
        return tuple(members)

    def refine(self, axis: str, sizes: Sequence[int]) -> Mesh:
        """The same ranks with `axis` broken into sub-axes of `sizes`, major first."""
        assert math.prod(sizes) == dict(self.axes)[axis], (axis, sizes, self.axes)
        refined: list[tuple[str, int]] = []
        for name, size in self.axes:
            if name == axis:
                refined += [(f"{name}.{i}", part) for i, part in enumerate(sizes)]
            else:
                refined.append((name, size))
        return Mesh(tuple(refined))

    @property
    def num_microbatches(self) -> int:
        return dict(self.axes).get(MICROBATCHES, 1)

    def with_microbatches(self, number: int) -> Mesh:
        """Every rank `number` times over, once for each microbatch: microbatch j of rank r is `r * number + j` here."""
        return Mesh((*self.ranks.axes, (MICROBATCHES, number))) if number > 1 else self.ranks

    @property
    def ranks(self) -> Mesh:
        """The mesh without the axis in time."""
        return self.without(MICROBATCHES)

    def without(self, *axes: str) -> Mesh:
        """The mesh of those that differ on the other axes."""
        return Mesh(tuple(axis for axis in self.axes if axis[0] not in axes))

    def project(self, rank: int, smaller: Mesh) -> int:
        """Where `rank` stands on a mesh that lacks some of the axes."""
        at = self.coordinates(rank)
        return smaller.rank_at({name: at[name] for name in smaller.names})

    def parts(self, axis: str) -> tuple[str, ...]:
        """The sub-axes of `axis` on this mesh, or `axis` itself; empty when it is absent."""
        return tuple(name for name in self.names if parent(name) == axis)

    @property
    def num_shares(self) -> int:
        """Into how many shares `dp` divides a batch."""
        return self.size_of(self.parts("dp"))

    def require_supported(self, world_size: int | None = None) -> None:
        """Raise `MeshError` for axes that nothing is split over yet, and where the world of real ranks has another size."""
        unknown = [name for name in self.names if name not in RESERVED_AXES]
        if unknown:
            raise MeshError(f"unknown mesh axis {unknown[0]!r}; known axes are {', '.join(RESERVED_AXES)}")
        later = [name for name in self.names if name not in ("pp", "dp", "tp") and self.size_of([name]) > 1]
        if later:
            raise MeshError(
                f"axis {later[0]!r} has {self.size_of(later[:1])} ranks, but only pp, dp and tp are split so far; use a mesh of these"
            )
        if world_size not in (None, self.size):
            raise MeshError(
                f"the mesh ({self}) has {self.size} ranks, the world has {world_size}; start as many processes as the mesh has ranks"
            )

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes)


def parent(axis: str) -> str:
    """The user's axis that `axis` is, or is a part of: `tp.1` → `tp`."""
    return axis.split(".", 1)[0]


def virtual_mesh(**axes: int) -> Mesh:
    """A mesh of ranks inside this one process: `virtual_mesh(dp=2, tp=2)`.

    Axes keep the order they are given in, outermost first; `virtual_mesh(world=8)` is a flat one, of which `autopar.compile` makes axes.
    Raises `MeshError` for an unknown axis name or a size below 1.
    """
    if tuple(axes) == (FLAT,):
        return Mesh(tuple(axes.items()))
    unknown = [name for name in axes if name not in RESERVED_AXES]
    if unknown:
        raise MeshError(f"unknown mesh axis {unknown[0]!r}; known axes are {', '.join(RESERVED_AXES)}")
    return Mesh(tuple(axes.items()))
