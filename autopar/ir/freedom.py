"""The roles of the mesh's axes: which split the batch, which anything else, and which both."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import MICROBATCHES, Mesh, parent
from autopar.ir.zero import ZeRO


@dataclass(frozen=True)
class Freedom:
    """Which axes split the batch, and whether the axes of the batch also split parameters.

    batch              axes that split the batch wherever they divide it; by default `dp`, which is what a user of `dp` asked for
    flexible           axes that may split the batch or anything else, as cost has it
    shards_parameters  whether the axes of `batch` may split what has no batch: parameters lie in parts and are gathered before
                       their use, gradients are reduced to parts (fully sharded data parallelism). Otherwise each of their
                       ranks holds parameters whole.
    zero               the level of ZeRO that was asked for: then parameters do lie in parts, over those of `dp` that it names

    All other axes split anything but the batch. A sub-axis (`tp.0`) has the role of its axis. Microbatches split the batch
    and nothing else, always.
    """

    batch: tuple[str, ...] = ("dp",)
    flexible: tuple[str, ...] = ()
    shards_parameters: bool = False
    zero: ZeRO | None = None

    def is_batch(self, axis: str) -> bool:
        return parent(axis) in self.batch or axis == MICROBATCHES

    def may_split_parameters(self, axis: str) -> bool:
        """Whether `axis`, which splits the batch, may split what has none."""
        return self.shards_parameters and axis != MICROBATCHES and (self.zero is None or self.zero.splits_masters(axis))

    def minor(self, axis: str) -> int:
        """Where `axis` stands among the axes of one atom of what has no batch, 0 first: what ZeRO gathers is minor, so that what is left of
        an atom lies as the other axes have it."""
        if self.zero is None or not self.zero.splits_masters(axis):
            return 0
        return 1 if self.zero.splits_copies(axis) else 2

    def master_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes over which parameters must lie in parts, those first over which copies of them lie in parts, too."""
        zero = self.zero
        axes = [axis for axis, size in mesh.axes if size > 1 and zero is not None and zero.splits_masters(axis)]
        return tuple(sorted(axes, key=self.minor))

    def copy_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Those of them over which the copies that are computed with lie in parts."""
        return tuple(axis for axis, size in mesh.axes if size > 1 and self.zero is not None and self.zero.splits_copies(axis))

    @property
    def cuts_each_microbatch(self) -> bool:
        """Whether the gradient of a parameter in parts is cut after every microbatch, so that it is summed in parts."""
        return self.shards_parameters and (self.zero is None or self.zero.cuts_each_microbatch)

    def is_flexible(self, axis: str) -> bool:
        return parent(axis) in self.flexible
