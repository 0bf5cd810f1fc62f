"""What is to be written, before a byte of it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.runtime.checkpoint.index import Index


@dataclass(frozen=True)
class Snapshot:
    """All that one process knows of a checkpoint before a byte is written: the index, equal on all, and its own tensors by file."""

    index: Index
    files: Mapping[str, Mapping[str, torch.Tensor]]

    def copied(self, earlier: Snapshot | None) -> Snapshot:
        """With memory of its own on the host: that of an `earlier` copy, which nobody reads any more, where it fits."""
        there = {} if earlier is None else earlier.files
        files = {
            file: {name: _on_host(each, there.get(file, {}).get(name)) for name, each in tensors.items()}
            for file, tensors in self.files.items()
        }
        return Snapshot(self.index, files)


def _on_host(tensor: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    """Half of what a copy into new memory takes is the kernel's, which clears each page first."""
    fits = earlier is not None and (earlier.shape, earlier.dtype) == (tensor.shape, tensor.dtype)
    return (earlier if earlier is not None and fits else torch.empty(tensor.shape, dtype=tensor.dtype)).copy_(tensor)
