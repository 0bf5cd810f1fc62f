"""Where the ranks of this process hold the results of a compiled call: found once, read at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.driver.compiled import Compiled
from autopar.graph.microbatches import summed
from autopar.ir.mesh import MICROBATCHES, Mesh
from autopar.ir.program import Input, Output
from autopar.ir.schedule import Schedule


class ResultPlace(NamedTuple):
    """`buffers` are (place on `mesh`, rank, name), the first of a place counts. `mesh` is that of one stage, with microbatches where
    ranks hold a part of each; `item` is the result as it lies on it."""

    item: Output
    mesh: Mesh
    buffers: tuple[tuple[int, int, str], ...]


@dataclass
class ResultPlaces:
    """By result of `compiled` where `ranks` hold it."""

    compiled: Compiled
    ranks: Sequence[int]
    _found: dict[tuple[str, str], ResultPlace] = field(default_factory=dict[tuple[str, str], ResultPlace])

    def of(self, item: Output) -> ResultPlace:
        key = item.kind, item.name
        if key not in self._found:
            self._found[key] = self._find(item)
        return self._found[key]

    def _find(self, item: Output) -> ResultPlace:
        mesh = self.compiled.local.mesh
        number = next(len(names) for schedule in self.compiled.schedules if (names := buffers_of(item, schedule)))
        one_stage = mesh.without("pp") if number > 1 else mesh.without("pp", MICROBATCHES)
        found: list[tuple[int, int, str]] = []
        for rank in self.ranks:
            place = mesh.ranks.project(rank, one_stage.ranks) * number
            found += [(place + index, rank, name) for index, name in enumerate(buffers_of(item, self.compiled.schedule_of(rank)))]
        return ResultPlace(replace(item, sharding=item.sharding and summed(item.sharding)), one_stage, tuple(found))


def buffers_of(item: Input | Output, schedule: Schedule) -> tuple[str, ...]:
    """The buffers that hold `item`; none where the rank has no use for it."""
    return (schedule.fed if isinstance(item, Input) else schedule.left).get((item.kind, item.name), ())
