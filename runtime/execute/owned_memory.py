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

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        address, needed = tensor.data_ptr(), tensor.nbytes
        is_whole = self._parts.get(address) == needed or is_alone(tensor)
        shared = not is_whole or address in self._taken or id(tensor) in self._others or not tensor.is_contiguous()
        self._taken.add(address)
        return tensor.clone(memory_format=torch.contiguous_format) if shared else tensor
