"""What a rewriting pass says of every place where it looked: fused, on which conditions, or not, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch.fx import Node

from autopar.keys import SOURCE, Source


class Refused(Exception):
    """A near miss. The text completes "attention at model.py:41 not fused: …"."""


@dataclass(frozen=True)
class Found:
    """A `what` ("attention", "norm", …) at `source`: fused, by the conditions that were found to hold, or not, for a reason.

    `node` is the name of its last node, whose result it is.
    """

    what: str
    node: str
    source: Source
    conditions: tuple[str, ...] = ()
    reason: str = ""

    @staticmethod
    def at(node: Node, what: str, conditions: tuple[str, ...] = (), reason: str = "") -> Found:
        return Found(what, node.name, SOURCE.get(node) or Source(), conditions, reason)

    @property
    def fused(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        file = os.path.basename(self.source.file)
        place = f"{self.what} at {file}:{self.source.line}" if file else f"{self.what} {self.node}"
        return f"{place} fused: {'; '.join(self.conditions)}" if self.fused else f"{place} not fused: {self.reason}"


@dataclass(frozen=True)
class FusionDecision:
    """Every place where a pass looked, in the order of the program."""

    found: tuple[Found, ...]

    @property
    def fused(self) -> tuple[Found, ...]:
        return tuple(each for each in self.found if each.fused)

    @property
    def refused(self) -> tuple[Found, ...]:
        return tuple(each for each in self.found if not each.fused)

    def __str__(self) -> str:
        return "\n".join(map(str, self.found)) or "nothing to fuse"
