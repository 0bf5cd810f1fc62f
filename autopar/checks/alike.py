"""Which ranks run the same schedule up to a shift along the mesh: one rank of each such class is checked, on behalf of all.

An axis is *uniform* when all ranks along it have the same schedule, and no SEND or RECV goes along it. Ranks whose coordinates
differ on uniform axes only are one class: they run the same instructions, in groups and channels shifted along these axes.

Why one rank of a class is enough: execution is confluent, since a rank that advances never takes away what another one waits
for. The order in which ranks advance makes no difference, so let all ranks of a class advance together. What one of them waits
for from another class is launched by all ranks of that class together, and so is there for all who wait; what it waits for from
its own class is launched at the same moment. So ranks of a class are always at the same instruction, and the ranks at
coordinate 0 of the uniform axes, taken alone, deadlock exactly when all ranks do. A collective over uniform axes alone is
launched in one order by construction. Shapes depend on the sizes of groups, and are checked with groups of full size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.ir.instructions import Receive, Send
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule


@dataclass(frozen=True)
class Alike:
    """One rank of each class, that at coordinate 0 of the uniform axes, with its schedule. `mesh` has all ranks."""

    schedules: Mapping[int, Schedule]
    mesh: Mesh
    uniform: frozenset[str]

    @staticmethod
    def of(schedules: Mapping[int, Schedule], mesh: Mesh) -> Alike:
        """`schedules` has one for every rank. Ranks run the same when they share the object."""
        identities = np.array([id(schedules[rank]) for rank in range(mesh.size)]).reshape([size for _, size in mesh.axes])
        distinct = {id(schedule): schedule for schedule in schedules.values()}
        crossed = {each.axis for one in distinct.values() for each in one.instructions if isinstance(each, (Send, Receive))}
        is_same = {name: bool((identities == identities.take([0], dim)).all()) for dim, name in enumerate(mesh.names)}
        uniform = frozenset(name for name in mesh.names if is_same[name] and name not in crossed)
        numbers = np.arange(mesh.size).reshape(identities.shape)
        chosen = numbers[tuple(0 if name in uniform else slice(None) for name in mesh.names)]
        return Alike({rank: schedules[rank] for rank in map(int, np.ravel(chosen))}, mesh, uniform)

    @cached_property
    def has_transfers(self) -> bool:
        return any(isinstance(each, (Send, Receive)) for schedule in self.schedules.values() for each in schedule.instructions)

    def members(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Of the group of `rank` along `axes`, those that are proved, in the order of the group."""
        return self.mesh.group(rank, [axis for axis in axes if axis not in self.uniform])

    def along(self, axes: Sequence[str]) -> tuple[str, ...]:
        """What tells two groups apart that have the same members here: the axes on which they have any."""
        return tuple(axis for axis in axes if self.mesh.size_of([axis]) > 1)
