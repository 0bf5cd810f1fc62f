"""How tensors lie in stretches of memory, so that bytes are all that is copied and views come back as views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from autopar.runtime._torch import with_lazy_signs

# Where a stretch begins in its storage, so that what begins aligned comes back so.
_ALIGNMENT_BYTES = 64


class Layout(NamedTuple):
    """How a tensor lies in a stretch of memory, the offset in elements; and what torch would still do to the numbers there: conjugate
    them, or negate them."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    is_conjugate: bool = False
    is_negative: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, begin_bytes: int) -> Layout:
        """In a stretch that begins at this byte of its storage."""
        offset = int(tensor.storage_offset()) - begin_bytes // tensor.dtype.itemsize
        return Layout(tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def view(self, stretch: torch.Tensor) -> torch.Tensor:
        found = torch.empty(0, dtype=self.dtype, device=stretch.device)
        found = found.set_(stretch.untyped_storage(), self.offset, self.shape, self.strides)
        return with_lazy_signs(found, self.is_conjugate, self.is_negative)


class Stretch(NamedTuple):
    """`bytes` of a memory from the first that some tensors use to the last, and by the number of each how it lies there."""

    bytes: torch.Tensor
    members: tuple[tuple[int, Layout], ...]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is numbers in a memory, and nothing else: sparse ones and classes of their own are more. Without elements there is
    nothing to copy."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.numel() > 0


def stretches_of(tensors: Sequence[torch.Tensor]) -> list[Stretch]:
    """Each memory that some of the plain ones among `tensors` lie in."""
    by_storage: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if is_plain(tensor):
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    return [_stretch(tensors, numbers) for numbers in by_storage.values()]


def _stretch(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Stretch:
    spans = [_span(tensors[number]) for number in numbers]
    begin, end = min(begin for begin, _ in spans) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, max(end for _, end in spans)
    first = tensors[numbers[0]]
    empty = torch.empty(0, dtype=torch.uint8, device=first.device)
    found = empty.set_(first.untyped_storage(), begin, (end - begin,), (1,))
    return Stretch(found, tuple((number, Layout.of(tensors[number], begin)) for number in numbers))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and that behind the last."""
    begin = int(tensor.storage_offset())
    last = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.dtype.itemsize, (last + 1) * tensor.dtype.itemsize
