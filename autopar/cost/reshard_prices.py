"""Prices of changes of sharding, each worked out once: a search asks for hundreds of thousands of pairs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.cost.model import CostModel
from autopar.ir.sharding import Sharding


@dataclass
class ReshardPrices:
    """`CostModel.reshard` by what it depends on: the atoms that are split otherwise before than after, and the bytes of the rest."""

    cost: CostModel
    _known: dict[Hashable, float] = field(default_factory=dict[Hashable, float])

    def seconds(self, num_bytes: float, source: Sharding, target: Sharding, known_ahead: bool = False) -> float:
        """As `CostModel.reshard`. What is split alike before and after stays where it is, whatever atom it is."""
        changed: list[tuple[str, ...]] = []
        for have, want in zip(source.splits, target.splits, strict=True):
            if have != want:
                changed += (have, want)
            elif have:
                num_bytes /= self.cost.mesh.size_of(have)
        key = num_bytes, *changed, source.unreduced, target.unreduced, known_ahead
        if key not in self._known:
            before, after = Sharding(tuple(changed[::2]), source.unreduced), Sharding(tuple(changed[1::2]), target.unreduced)
            self._known[key] = self.cost.reshard(num_bytes, before, after, known_ahead)
        return self._known[key]
