"""Reports of the fusing passes: each place where one of our ops could stand, whether it does or why not, and which kernel runs it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from autopar.ir.keys import SOURCE, Source


def place_of(what: str, source: Source, name: str) -> str:
    """`attention at model.py:41`; by the node's `name` where the user's line is not known."""
    return f"{what} at {os.path.basename(source.file)}:{source.line}" if source.file else f"{what} {name}"


class NotFusible(Exception):
    """A near miss. The text completes "attention at model.py:41 not fused: …"."""


@dataclass(frozen=True)
class FusionSite:
    """A `what` ("attention", "norm", …) at `source`: fused, by the conditions that were found to hold, or not, for a reason.

    `node` is the name of its last node, whose result it is; `match`, of what is fused, is what the pass writes the op from.
    """

    what: str
    node: str
    source: Source
    conditions: tuple[str, ...] = ()
    reason: str = ""
    match: Any = field(default=None, compare=False, repr=False)

    @staticmethod
    def at(node: Node, what: str, conditions: tuple[str, ...] = (), reason: str = "", match: Any = None) -> FusionSite:
        return FusionSite(what, node.name, SOURCE.get(node) or Source(), conditions, reason, match)

    @property
    def fused(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        place = place_of(self.what, self.source, self.node)
        return f"{place} fused: {'; '.join(self.conditions)}" if self.fused else f"{place} not fused: {self.reason}"


@dataclass(frozen=True)
class FusionDecision:
    """Every place where a pass looked, in the order of the program."""

    found: tuple[FusionSite, ...]

    @property
    def fused(self) -> tuple[FusionSite, ...]:
        return tuple(each for each in self.found if each.fused)

    @property
    def refused(self) -> tuple[FusionSite, ...]:
        return tuple(each for each in self.found if not each.fused)

    def __str__(self) -> str:
        return "\n".join(map(str, self.found)) or "nothing to fuse"


@dataclass(frozen=True)
class KernelChoice:
    """The `kernel` of the attention `key` (`node_keys`) of a FORWARD program, and why; `place` is where the user wrote it."""

    key: str
    kernel: str
    reason: str
    place: str

    def __str__(self) -> str:
        return f"{self.place} by {self.kernel}: {self.reason}"


@dataclass(frozen=True)
class KernelDecision:
    """A kernel for every attention, in the order of the program."""

    choices: tuple[KernelChoice, ...]

    @property
    def kernels(self) -> dict[str, str]:
        return {choice.key: choice.kernel for choice in self.choices}

    def __str__(self) -> str:
        return "\n".join(map(str, self.choices)) or "nothing to choose"
