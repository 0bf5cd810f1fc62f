"""Ranks that are alike: of each class one is proved, and stands for all.

An axis is *uniform* when no rank's schedule changes along it and no SEND or RECV goes along it. Ranks that differ on uniform
axes alone run one and the same list, in groups and channels that are the same but for a shift along these axes.

That proves them all. Execution is confluent: a rank that advances never takes from another what it waits for, so whoever goes
first, all get equally far. Let a whole class advance at once: what one of its ranks waits for is launched by a rank of another
class, and by all others of that class for all others of the first; what a class waits for within itself is launched by all
its ranks at the same moment. So ranks that are alike always stand at the same instruction, and those at coordinate 0 of the
uniform axes, meeting among themselves, deadlock exactly when all ranks do. A collective over uniform axes alone is launched in
one order by construction. Shapes depend on how many ranks a group has, and are proved with all of them.
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
