"""Gathers and scatters over several nodes as two collectives, one between nodes and one within them: as many bytes in fewer steps.

gather    ranks 0 1 | 2 3 hold a b | c d:   0 and 2 gather (a c), 1 and 3 (b d), then 0 and 1, as 2 and 3, (a c b d)
scatter   the other way round: what 0 and 1 hold for 0 and 2 is added up on 0, and that of 2 and 3 on 2, then those two on each
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.runtime.execute.process_groups import Group
from autopar.runtime.execute.settled_work import Work


@dataclass(frozen=True)
class ByNode:
    """The ranks of several nodes: those that stand alike on them, `across`, and this one's neighbours, `within`.

    What is gathered lies in order of the neighbours, and then of the nodes, until it is put in order. `stream`: where a GPU waits for
    the first collective before it begins the second.
    """

    across: Group
    within: Group
    stream: torch.cuda.Stream | None = None

    @property
    def size(self) -> int:
        return self.across.size * self.within.size

    @property
    def place(self) -> int:
        """Where this rank's part lies."""
        return self.within.place * self.across.size + self.across.place

    def by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """A view of `rows`, as they lie, as `[nodes, neighbours, …]`."""
        return rows.unflatten(0, (self.within.size, self.across.size)).transpose(0, 1)

    def in_ranks(self, parts: torch.Tensor) -> torch.Tensor:
        """A view of `parts`, one for each rank in order, as `[nodes, neighbours, …]`."""
        return parts.unflatten(0, (self.across.size, self.within.size))

    def begun(self, first: Callable[[], Work], then: Callable[[], Work]) -> Work:
        """The collective that `first` launches, and behind it what `then` launches."""
        if self.stream is None:
            return Chained(first(), then)
        work = first()
        with torch.cuda.stream(self.stream):
            work.wait()
            return then()


@dataclass(frozen=True)
class Chained:
    """A collective, and one that needs what it brings, which is launched when that is waited for: a WAIT is a meeting point of ranks here.

    They come to it in one order, also among what else is launched in these groups: ranks of a group that goes by node run one schedule.
    """

    first: Work
    then: Callable[[], Work]

    def wait(self) -> None:
        self.first.wait()
        self.then().wait()
