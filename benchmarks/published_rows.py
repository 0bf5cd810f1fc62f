"""What the comparisons of `benchmarks/foresight.py` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.foresight.step import Step

Row = Mapping[str, str]
Tables = dict[str, list[Row]]
# In units of the memory columns, as far as they agree with counts by hand.
GIB = 2**30


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


@dataclass(frozen=True)
class Case:
    """One row: what tells it from others, the step that was run, and what was printed of it: seconds, and of some rows GiB."""

    where: dict[str, Any]
    printed: float
    step: Step
    printed_gib: float | None = None

    def compared(self) -> Compared:
        found = self.step.prediction()
        memory = {"GiB": self.printed_gib, "predicted GiB": found.peak_bytes / GIB} if self.printed_gib is not None else {}
        return Compared(self.where, self.printed, found.step_seconds, memory)
