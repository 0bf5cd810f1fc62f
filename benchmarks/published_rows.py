"""What the comparisons of `benchmarks/foresight.py` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, str]
Tables = dict[str, list[Row]]


@dataclass(frozen=True)
class Compared:
    """One row: what tells it from others, printed and predicted seconds, and what else was compared."""

    where: dict[str, Any]
    printed: float
    predicted: float
    others: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def error(self) -> float:
        return self.predicted / self.printed - 1

    def line(self) -> dict[str, Any]:
        seconds = {"printed s": self.printed, "predicted s": self.predicted, "error %": round(100 * self.error, 1)}
        return self.where | seconds | self.others
