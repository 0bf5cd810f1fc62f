"""Memory of buckets: several tensors side by side, reduced or gathered as one. What was reduced is handed out as views.

A bucket's memory is used again at the next step once nobody looks at what was handed out of it: a loop that sets gradients to None
takes no new memory, one that keeps or adds up gradients gets another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from autopar.cost.memory_walk import BUCKET_ALIGNMENT_BYTES
from autopar.ir.schedule import TensorType
from autopar.runtime._torch import copy_all, num_holders

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """Where tensors of `shapes` begin side by side, contiguous, in a flat memory of `size` elements."""

    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    @cache
    def of(cls, shapes: Shapes, dtype: torch.dtype) -> Layout:
        unit = max(BUCKET_ALIGNMENT_BYTES // dtype.itemsize, 1)
        *offsets, total = accumulate((math.ceil(math.prod(shape) / unit) * unit for shape in shapes), initial=0)
        return cls(tuple(map(torch.Size, shapes)), tuple(offsets), total)

    def memory(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """Room for so many, one behind the other. What lies between tensors travels, too, and is 0."""
        is_dense = sum(shape.numel() for shape in self.shapes) == self.size
        return (like.new_empty if is_dense else like.new_zeros)(number * self.size)

    def rows(self, memory: torch.Tensor, number: int) -> tuple[torch.Tensor, ...]:
        """Views of so many layouts like this, one behind the other in `memory`: of each tensor `[number, *shape]`, with gaps between."""
        laid = memory.view(number, -1)
        found = (laid.narrow(1, offset, shape.numel()) for offset, shape in zip(self.offsets, self.shapes, strict=True))
        return tuple(rows.unflatten(1, shape) if len(shape) else rows.squeeze(1) for rows, shape in zip(found, self.shapes, strict=True))

    def unpacked(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """New views of the tensors in `memory`, flat and contiguous."""
        # One call a tensor: there are as many as parameters, and a view takes longer than anything else that is done with each.
        begin = memory.storage_offset()
        places = zip(self.shapes, self._strides, self.offsets, strict=True)
        return tuple([memory.as_strided(shape, stride, begin + offset) for shape, stride, offset in places])

    @cached_property
    def _strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(torch.empty(shape, device="meta").stride() for shape in self.shapes)


@dataclass(frozen=True)
class Bucket:
    """`memory` is flat, laid out as `layout` says. `holders` is `num_holders` without any of its tensors."""

    memory: torch.Tensor
    layout: Layout
    holders: int

    @classmethod
    def of(cls, layout: Layout, dtype: torch.dtype, device: torch.device) -> Bucket:
        memory = torch.zeros(layout.size, dtype=dtype, device=device)  # what lies between tensors is reduced, too
        return cls(memory, layout, num_holders(memory))

    @cached_property
    def parts(self) -> Mapping[int, int]:
        """By the address where each tensor begins its bytes."""
        return {view.data_ptr(): view.nbytes for view in self.tensors() if view.numel()}

    @property
    def is_free(self) -> bool:
        return num_holders(self.memory) == self.holders

    def fits(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> bool:
        return (self.memory.dtype, self.memory.device) == (dtype, device) and self.layout == layout

    def pack(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor] | None = None) -> None:
        """Copy `tensors` of these shapes to their `places`, new views if none are given, where they are not these themselves."""
        views = self.tensors() if places is None else places
        moved = [(view, tensor) for view, tensor in zip(views, tensors, strict=True) if view is not tensor]
        if moved:
            copy_all(*zip(*moved, strict=True))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """New views of the tensors in it."""
        return self.layout.unpacked(self.memory)


class Reserved(NamedTuple):
    """A bucket that is to be filled: what makes a tensor may write it into its place, of `places`, which are the results once it is
    reduced, too."""

    bucket: Bucket
    places: tuple[torch.Tensor, ...]


@dataclass
class BucketMemory:
    """The buckets of one rank, by the name of their collective."""

    buckets: dict[str, Bucket] = field(default_factory=dict[str, Bucket])
    _parts: dict[int, int] | None = None

    @property
    def parts(self) -> Mapping[int, int]:
        """Those of all buckets, found anew when one of them is another."""
        if self._parts is None:
            self._parts = {address: size for bucket in self.buckets.values() for address, size in bucket.parts.items()}
        return self._parts

    def packed(self, name: str, tensors: Sequence[torch.Tensor]) -> Bucket:
        """`tensors`, of one dtype, copied into the bucket of this name."""
        bucket = self.like(name, tensors)
        bucket.pack(tensors)
        return bucket

    def like(self, name: str, tensors: Sequence[torch.Tensor]) -> Bucket:
        """The bucket of this name, with room for tensors like `tensors`, of one dtype; what is in it nobody looks at."""
        return self._free(name, tuple([tensor.shape for tensor in tensors]), tensors[0].dtype, tensors[0].device)

    def reserved(self, name: str, layouts: Sequence[TensorType], device: torch.device) -> Reserved:
        """The bucket of this name with room for tensors like these, of one dtype, which nobody else gets while its places are held."""
        bucket = self._free(name, tuple([shape for shape, _ in layouts]), layouts[0][1], device)
        return Reserved(bucket, bucket.tensors())

    def _free(self, name: str, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Bucket:
        bucket, layout = self.buckets.get(name), Layout.of(shapes, dtype)
        if bucket is None or not bucket.fits(layout, dtype, device) or not bucket.is_free:
            bucket = self.buckets[name] = Bucket.of(layout, dtype, device)
            self._parts = None
        return bucket
