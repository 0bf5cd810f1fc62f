"""Which of parameters, gradients and optimizer state lie in parts over the ranks of `dp` (Rajbhandari et al., arXiv:1910.02054).

level  master, optimizer state   gradient                                      what is computed with
1      in parts                  summed whole over microbatches, then cut      a copy, whole, gathered once a step
2      in parts                  cut after every microbatch                    a copy, whole, gathered once a step
3      in parts                  cut after every microbatch                    gathered for the forward, and anew for the backward

Copies have the dtype that is computed in. At level 3 a copy in a lower dtype than the master lies in parts, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import AutoparError, MeshError, PlanError
from autopar.ir.mesh import Mesh, parent

# The axis of data parallelism, the only one that ZeRO splits over.
LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class ZeRO:
    """`level`, and over how many ranks of `dp`.

    shards      parts lie over groups of so many neighbours along `dp` (the ranks of a node), with replicas across groups: gradients are
                reduce-scattered inside and all-reduced across. By default over all of `dp`
    secondary   at level 3, masters lie over all of `dp`, and a copy over groups of so many, gathered from the masters once a step: the
                gathers of forward and backward stay inside a group (hpZ of ZeRO++, arXiv:2306.10209)

    Raises `AutoparError` for a level that there is not, and for groups that make no sense.
    """

    level: int
    shards: int | None = None
    secondary: int | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS or isinstance(self.level, bool):
            raise AutoparError(f"zero={self.level!r} is no level of ZeRO: use 0, 1, 2 or 3, or autopar.ZeRO(level=..., shards=...)")
        for name in ("shards", "secondary"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or size < 2):
                raise AutoparError(f"ZeRO({name}={size!r}) makes no parts: it is a number of ranks, 2 or more")
        if self.level == 0 and self.group is not None:
            raise AutoparError(f"ZeRO(level=0) splits nothing: leave out {'shards' if self.shards else 'secondary'}={self.group}")
        if self.secondary is not None and (self.level < 3 or self.shards is not None):
            other = f"level={self.level}" if self.level < 3 else f"shards={self.shards}"
            raise AutoparError(
                f"ZeRO({other}, secondary={self.secondary}): a secondary copy is of level 3, whose masters lie over all of dp"
            )

    @staticmethod
    def of(asked: int | ZeRO | None) -> ZeRO | None:
        """From `zero=` of `autopar.compile`. Raises `AutoparError` for what is none."""
        return asked if asked is None or isinstance(asked, ZeRO) else ZeRO(asked)

    @property
    def group(self) -> int | None:
        """The size of the groups into which `dp` is broken, if it is."""
        return self.shards or self.secondary

    def on(self, mesh: Mesh) -> ZeRO:
        """As it is on `mesh`: groups as large as `dp` are none. Raises `MeshError` where `dp` is missing, `PlanError` where groups do not
        fit."""
        size = mesh.num_shares
        if self.level and not mesh.parts("dp"):
            raise MeshError(f"zero={self.level} splits over the axis dp, and the mesh ({mesh}) has none: add one, or leave zero out")
        if self.group is None:
            return self
        if size % self.group:
            name = "shards" if self.shards else "secondary"
            raise PlanError(f"ZeRO({name}={self.group}) does not divide dp = {size}: use a divisor of it")
        return ZeRO(self.level) if self.group == size else self

    def num_parts(self, mesh: Mesh) -> int:
        """In how many parts masters lie, whether `dp` is broken into groups already or not."""
        size = mesh.num_shares
        return 1 if self.level == 0 else min(self.shards or size, size)

    def splits_masters(self, axis: str) -> bool:
        """Whether parameters lie in parts over `axis`, `dp` or a sub-axis of it."""
        return self.level > 0 and parent(axis) == "dp" and (self.shards is None or axis != "dp.0")

    def splits_copies(self, axis: str) -> bool:
        """Whether the copies that are computed with do."""
        return self.level == 3 and self.splits_masters(axis) and (self.secondary is None or axis != "dp.0")

    @property
    def cuts_each_microbatch(self) -> bool:
        """Whether gradients are reduce-scattered before they are summed over the microbatches."""
        return self.level >= 2

    def content(self) -> dict[str, int]:
        """As a JSON value."""
        return {name: value for name in ("level", "shards", "secondary") if (value := getattr(self, name)) is not None}

    @staticmethod
    def of_content(content: Mapping[str, int] | None) -> ZeRO | None:
        """Read back what `content` gave."""
        return None if content is None else ZeRO(**content)

    def __str__(self) -> str:
        groups = f", shards={self.shards}" if self.shards else f", secondary={self.secondary}" if self.secondary else ""
        return f"ZeRO(level={self.level}{groups})" if groups else f"zero={self.level}"
