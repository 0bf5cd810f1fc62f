"""The roles of the mesh's axes: which split the batch, which anything else, and which both."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import MICROBATCHES, parent


@dataclass(frozen=True)
class Freedom:
    """Which axes split the batch, and whether the axes of the batch also split parameters.

    batch              axes that split the batch wherever they divide it; by default `dp`, which is what a user of `dp` asked for
    flexible           axes that may split the batch or anything else, as cost has it
    shards_parameters  whether the axes of `batch` may split what has no batch: parameters lie in parts and are gathered before
                       their use, gradients are reduced to parts (fully sharded data parallelism). Otherwise each of their
                       ranks holds parameters whole.

    All other axes split anything but the batch. A sub-axis (`tp.0`) has the role of its axis. Microbatches split the batch
    and nothing else, always.
    """

    batch: tuple[str, ...] = ("dp",)
    flexible: tuple[str, ...] = ()
    shards_parameters: bool = False

    def is_batch(self, axis: str) -> bool:
        return parent(axis) in self.batch or axis == MICROBATCHES

    def may_split_parameters(self, axis: str) -> bool:
        """Whether `axis`, which splits the batch, may split what has none."""
        return self.shards_parameters and axis != MICROBATCHES

    def is_flexible(self, axis: str) -> bool:
        return parent(axis) in self.flexible
