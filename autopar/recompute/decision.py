"""Which calls of the forward the backward does once more, as a value that prints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RecomputeDecision:
    """The calls of the forward, by node name, that the backward may do once more, and in words why those.

    `fits` is False where a budget is exceeded all the same; `peak_bytes` are counted of a rank then, infinite where nobody counted."""

    nodes: frozenset[str] = field(default=frozenset(), repr=False)
    reason: str = ""
    fits: bool = True
    peak_bytes: float = math.inf

    @property
    def is_chosen(self) -> bool:
        """Whether somebody counted, and found that it fits."""
        return self.fits and self.peak_bytes < math.inf

    def __str__(self) -> str:
        return self.reason or "all that the backward reads is kept"
