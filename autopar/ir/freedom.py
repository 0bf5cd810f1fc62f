"""What each axis of the mesh may split: the batch, anything else, or both."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import MICROBATCHES, parent


@dataclass(frozen=True)
class Freedom:
    """Which axes split the batch, and whether the axes of the batch also split parameters.

    batch    axes that split the batch wherever they divide it; by default `dp`, which is what a user of `dp` asked for
    free     axes that may split the batch or anything else, as cost has it
    stored   whether the axes of `batch` may split what has no batch: parameters lie in parts and are gathered before
             their use, gradients are reduced to parts (fully sharded data parallelism). Otherwise each of their
             ranks holds parameters whole.

    All other axes split anything but the batch. A sub-axis (`tp.0`) is as free as its axis. Microbatches split the batch
    and nothing else, always.
    """

    batch: tuple[str, ...] = ("dp",)
    free: tuple[str, ...] = ()
    stored: bool = False

    def is_batch(self, axis: str) -> bool:
        return parent(axis) in self.batch or axis == MICROBATCHES

    def is_stored(self, axis: str) -> bool:
        """Whether `axis`, which splits the batch, may split what has none."""
        return self.stored and axis != MICROBATCHES

    def is_free(self, axis: str) -> bool:
        return parent(axis) in self.free
