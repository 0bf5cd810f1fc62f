"""How one value lies on the mesh.

An *atom* is the smallest piece of a dim that any op of the graph tells apart: the merged dim
of `x.view(B * S, H)` is two atoms. `Dims` lists the atom sizes of each dim, major first; a
dim of size 1 has no atoms. A `Sharding` names, for each atom in order, the axes that split it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from autopar.ir.mesh import Mesh

Dims = tuple[tuple[int, ...], ...]
ReductionKind = Literal["sum", "max", "logsumexp"]
REDUCTION_KINDS = get_args(ReductionKind)


def flat(dims: Dims) -> tuple[int, ...]:
    """All atoms of a value, dim by dim: `((2, 3), (4,))` → `(2, 3, 4)`."""
    return tuple(atom for dim in dims for atom in dim)


def atoms_of_dim(dims: Dims, dim: int) -> range:
    """Where the atoms of `dim` stand among all."""
    first = sum(map(len, dims[:dim]))
    return range(first, first + len(dims[dim]))


def shape_of(dims: Dims) -> tuple[int, ...]:
    return tuple(math.prod(dim) for dim in dims)


@dataclass(frozen=True)
class Sharding:
    """For each atom the mesh axes that split it, major first, and the axes it is unreduced over.

    A value *unreduced* over an axis ("Partial" in DTensor) is the sum, or the maximum, or the logarithm of the sum of
    exponentials, of what the ranks along that axis hold. An axis appears at most once in all.
    """

    splits: tuple[tuple[str, ...], ...]
    unreduced: tuple[tuple[str, ReductionKind], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # One order, so that shardings which mean the same are equal.
        if len(self.unreduced) > 1:
            object.__setattr__(self, "unreduced", tuple(sorted(self.unreduced)))
        # Searches look shardings up a million times.
        object.__setattr__(self, "_hash", hash((self.splits, self.unreduced)))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def replicated(dims: Dims) -> Sharding:
        return Sharding(((),) * len(flat(dims)))

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis in use, splits first."""
        return tuple(axis for split in self.splits for axis in split) + tuple(axis for axis, _ in self.unreduced)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split it."""
        return tuple(axis for split in self.splits for axis in split)

    @property
    def is_replicated(self) -> bool:
        return not self.unreduced and not any(self.splits)

    def problems(self, dims: Dims, mesh: Mesh) -> list[str]:
        """Every way in which this sharding is illegal for a value of `dims` on `mesh`."""
        atoms, found = flat(dims), []
        if len(atoms) != len(self.splits):
            return [f"{len(self.splits)} atoms in the sharding, {len(atoms)} in the value"]
        for axis in sorted(set(self.axes)):
            if axis not in mesh.names:
                found.append(f"axis {axis!r} is not on the mesh ({mesh})")
            if self.axes.count(axis) > 1:
                found.append(f"axis {axis!r} is used {self.axes.count(axis)} times; once is legal")
        if not found:
            for atom, split in zip(atoms, self.splits, strict=True):
                if atom % mesh.size_of(split):
                    found.append(f"an atom of {atom} does not divide over {'·'.join(split)} = {mesh.size_of(split)}")
        return found

    def local_dims(self, dims: Dims, mesh: Mesh) -> Dims:
        """The atoms that one rank holds (a fully split atom keeps its place with size 1)."""
        splits = iter(self.splits)
        return tuple(tuple(atom // mesh.size_of(next(splits)) for atom in dim) for dim in dims)

    def local_shape(self, dims: Dims, mesh: Mesh) -> tuple[int, ...]:
        return shape_of(self.local_dims(dims, mesh))

    def describe(self, dims: Dims) -> str:
        """`[8@dp, 16, (3, 4@tp, 8)] sum@tp`: sizes, the axes that split them, what is unreduced."""
        splits = iter(self.splits)

        def atom(size: int) -> str:
            split = next(splits)
            return f"{size}@{'·'.join(split)}" if split else str(size)

        parts = []
        for dim in dims:
            pieces = [atom(size) for size in dim]
            parts.append(pieces[0] if len(pieces) == 1 else f"({', '.join(pieces)})" if pieces else "1")
        unreduced = "".join(f" {kind}@{axis}" for axis, kind in self.unreduced)
        return f"[{', '.join(parts)}]{unreduced}"


def outline(sharding: Sharding, dims: Dims) -> Dims:
    """The fewest atoms with which `sharding` of a value of `dims` can be said: a dim is cut where a split begins alone."""
    splits, found = iter(sharding.splits), list[tuple[int, ...]]()
    for dim in dims:
        atoms = list[int]()
        for atom, split in [(atom, next(splits)) for atom in dim]:
            if split or not atoms:
                atoms.append(atom)
            else:
                atoms[-1] *= atom
        found.append(tuple(atoms))
    return tuple(found)


def carried(sharding: Sharding, dims: Dims, new_dims: Dims, mesh: Mesh) -> Sharding | None:
    """`sharding` of a value of `dims`, in words of `new_dims`: other atoms of the same sizes; every rank holds the same part.

    None where the new atoms cannot say it. An axis cuts what is left of an atom by those before it into contiguous parts, and so does it
    with any new atom, or what is left of one, that ends where this does and divides by the axis.
    """
    if dims == new_dims:
        return sharding
    if not sharding.axes:
        return Sharding.replicated(new_dims)
    if shape_of(dims) != shape_of(new_dims) or sharding.unreduced or not set(sharding.axes) <= set(mesh.names):
        return None
    splits, found = iter(sharding.splits), list[tuple[str, ...]]()
    for old, new in zip(dims, new_dims, strict=True):
        was = tuple(next(splits) for _ in old)
        splits_of_dim = was if old == new else _carried_dim(was, old, new, mesh)
        if splits_of_dim is None:
            return None
        found += splits_of_dim
    return Sharding(tuple(found))


def _carried_dim(splits: Sequence[tuple[str, ...]], old: Sequence[int], new: Sequence[int], mesh: Mesh) -> list[tuple[str, ...]] | None:
    found: list[tuple[str, ...]] = [()] * len(new)
    left = list(new)
    for place, split in enumerate(splits):
        size = math.prod(old[place:])  # of the range that is cut next, from the major end of an atom to the minor end of the dim
        for axis in split:
            parts = mesh.size_of((axis,))
            fits = (i for i, rest in enumerate(left) if rest * math.prod(new[i + 1 :]) == size and rest % parts == 0)
            taken = next(fits, None)
            if taken is None:
                return None
            found[taken] += (axis,)
            left[taken] //= parts
            size //= parts
    return found


@dataclass(frozen=True)
class Strategy:
    """One way to run an op: what each tensor operand must be, what each result then is.

    `factors` says which factor of the op's iteration space each axis splits, for people;
    `num_shards` is by how much that divides the op's work on a rank.
    """

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    factors: tuple[tuple[str, str], ...] = ()
    num_shards: int = 1

    def __str__(self) -> str:
        return " ".join(f"{axis}:{factor}" for axis, factor in self.factors) or "replicated"
