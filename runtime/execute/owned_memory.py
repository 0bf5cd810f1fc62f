"""Gradients in memory of their own."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence

import torch

from autopar.runtime._torch import is_alone
from autopar.runtime.execute.transport import Transport


class OwnedMemory:
    """Sees to it that a gradient shares memory with nothing: optimizers and clipping write into it. Its place in a bucket is its own.

    Of what else there is only `others` may be the same tensor; that another one shares its memory is read off the memory itself.
    """

    def __init__(self, transports: Sequence[Transport], others: Iterable[torch.Tensor]) -> None:
        self._others = set(map(id, others))
        self._taken: set[int] = set()
        parts = [each for transport in transports if (each := transport.bucket_parts())]
        self._parts: Mapping[int, int] = parts[0] if len(parts) == 1 else ChainMap(*map(dict, parts)) if parts else {}

    def own(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each as it is, or a copy where its memory is not its own."""
        parts, taken, others = self._parts, self._taken, self._others
        found: list[torch.Tensor] = []
        for each in tensors:
            address = each.data_ptr()
            is_whole = parts.get(address) == each.nbytes or is_alone(each)
            is_own = is_whole and address not in taken and id(each) not in others and each.is_contiguous()
            taken.add(address)
            found.append(each if is_own else each.clone(memory_format=torch.contiguous_format))
        return found
