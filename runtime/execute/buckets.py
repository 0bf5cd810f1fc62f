"""Memory of buckets: several tensors side by side, reduced or gathered as one. What was reduced is handed out as views.

A bucket's memory is used again at the next step once nobody looks at what was handed out of it: a loop that sets gradients to None
takes no new memory, one that keeps or adds up gradients gets another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from autopar.runtime._torch import num_holders

# Where a tensor may begin: what kernels like, and Inductor expects of its inputs.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Bucket:
    """`memory` is flat; tensors of `shapes` begin at `offsets` in it, contiguous. `holders` is `num_holders` without any of these."""

    memory: torch.Tensor
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    holders: int

    @classmethod
    def like(cls, tensors: Sequence[torch.Tensor]) -> Bucket:
        unit = max(ALIGNMENT_BYTES // tensors[0].element_size(), 1)
        sizes = [math.ceil(tensor.numel() / unit) * unit for tensor in tensors]
        *offsets, total = accumulate(sizes, initial=0)
        memory = tensors[0].new_zeros(total)  # what lies between tensors is reduced, too
        return cls(memory, tuple(tensor.shape for tensor in tensors), tuple(offsets), num_holders(memory))

    @cached_property
    def parts(self) -> Mapping[int, int]:
        """By the address where each tensor begins its bytes."""
        views = self.unpacked(self.memory)
        return {view.data_ptr(): view.nbytes for view in views if view.numel()}

    @property
    def is_free(self) -> bool:
        return num_holders(self.memory) == self.holders

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        first = tensors[0]
        is_alike = (self.memory.dtype, self.memory.device) == (first.dtype, first.device)
        return is_alike and self.shapes == tuple(tensor.shape for tensor in tensors)

    def pack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `tensors` of these shapes to their places."""
        for view, tensor in zip(self.unpacked(self.memory), tensors, strict=True):
            view.copy_(tensor)

    def rows(self, memory: torch.Tensor, number: int) -> tuple[torch.Tensor, ...]:
        """Views of so many buckets like this, one behind the other in `memory`: of each tensor `[number, *shape]`, with gaps between."""
        laid = memory.view(number, -1)
        found = (laid.narrow(1, offset, shape.numel()) for offset, shape in zip(self.offsets, self.shapes, strict=True))
        return tuple(rows.unflatten(1, shape) if len(shape) else rows.squeeze(1) for rows, shape in zip(found, self.shapes, strict=True))

    def unpacked(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """New views of the tensors in `memory`, this bucket's."""
        parts = memory.split(self._sizes)
        return tuple(
            (part if part.numel() == shape.numel() else part.narrow(0, 0, shape.numel())).view(shape)
            for part, shape in zip(parts, self.shapes, strict=True)
        )

    @cached_property
    def _sizes(self) -> list[int]:
        """How far it is from the beginning of each tensor to that of the next."""
        return [end - begin for begin, end in pairwise((*self.offsets, self.memory.numel()))]


@dataclass
class BucketMemory:
    """The buckets of one rank, by the name of their collective."""

    buckets: dict[str, Bucket] = field(default_factory=dict[str, Bucket])

    def packed(self, name: str, tensors: Sequence[torch.Tensor]) -> Bucket:
        """`tensors`, of one dtype, copied into the bucket of this name."""
        bucket = self.like(name, tensors)
        bucket.pack(tensors)
        return bucket

    def like(self, name: str, tensors: Sequence[torch.Tensor]) -> Bucket:
        """The bucket of this name, with room for tensors like `tensors`, of one dtype; what is in it nobody looks at."""
        bucket = self.buckets.get(name)
        if bucket is None or not bucket.fits(tensors) or not bucket.is_free:
            bucket = self.buckets[name] = Bucket.like(tensors)
        return bucket
