"""Prices of changes of sharding, each worked out once: a search asks for hundreds of thousands of pairs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.cost import CostModel
from autopar.sharding import Sharding


@dataclass
class ReshardPrices:
    """`CostModel.reshard` by what it depends on: the atoms that are split otherwise before than after, and the bytes of the rest."""

    cost: CostModel
    _known: dict[Hashable, float] = field(default_factory=dict[Hashable, float])

    def seconds(self, num_bytes: float, source: Sharding, target: Sharding, known_ahead: bool = False) -> float:
        """As `CostModel.reshard`. What is split alike before and after stays where it is, whatever atom it is."""
        kept = math.prod(
            map(self.cost.mesh.size_of, [have for have, want in zip(source.splits, target.splits, strict=True) if have == want])
        )
        changed = tuple(pair for pair in zip(source.splits, target.splits, strict=True) if pair[0] != pair[1])
        key = num_bytes / kept, changed, source.unreduced, target.unreduced, known_ahead
        if key not in self._known:
            before, after = (tuple(pair[side] for pair in changed) for side in (0, 1))
            reduced = Sharding(before, source.unreduced), Sharding(after, target.unreduced)
            self._known[key] = self.cost.reshard(num_bytes / kept, *reduced, known_ahead)
        return self._known[key]
