"""Tensors that lie in files without a name, and are read and written like any other: the system moves pages as it has room for them."""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import Literal

import torch

from autopar.errors import OffloadError
from autopar.ir.units import in_bytes
from autopar.runtime._torch import version_of
from autopar.runtime.offload.files import nameless

_OPEN_FILES = "/proc/self/fd"
# How torch counts the writes to a tensor, and a checksum of its bytes, when both were taken.
Seal = tuple[int, int]


class StateFiles:
    """A file for each tensor, in `folder`, mapped into memory and closed: it has no name from the start and is gone with its tensor, or
    with its process, however that ends. `option` of `Offload` asked for it. Raises `OffloadError` where the system has no such mapping."""

    def __init__(self, folder: str | Path, option: Literal["optimizer", "parameters"] = "optimizer") -> None:
        self.folder, self.option = str(folder), option
        if not Path(_OPEN_FILES).is_dir():
            raise OffloadError(f'{_OPEN_FILES} is how files without a name are mapped, and is not here: use Offload({option}="host")')

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`, contiguous. Raises `OffloadError` where there is no room, which is taken before anything is written: a mapped
        file that cannot grow ends the process."""
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        file = nameless(self.folder)
        try:
            os.posix_fallocate(file, 0, tensor.nbytes)
            mapped = torch.from_file(f"{_OPEN_FILES}/{file}", shared=True, size=tensor.nbytes, dtype=torch.uint8)
        except OSError as error:
            what = "state of the optimizer" if self.option == "optimizer" else "a parameter"
            raise OffloadError(
                f"{what} of {in_bytes(tensor.nbytes)} cannot be written to a file in {self.folder}: {error.strerror}; make room, name "
                f'another folder in Offload(folder=...), or keep it in host memory: Offload({self.option}="host")'
            ) from error
        finally:
            with contextlib.suppress(OSError):
                os.close(file)
        return mapped.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    @staticmethod
    def seal(tensor: torch.Tensor) -> Seal:
        """Of what was just written."""
        return version_of(tensor), zlib.crc32(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")

    def check(self, tensor: torch.Tensor, seal: Seal, what: str) -> None:
        """Raise `OffloadError` where bytes are others than those that were sealed, and nobody wrote them by torch."""
        version, wanted = seal
        if version_of(tensor) != version:
            return
        _, found = self.seal(tensor)
        if found != wanted:
            raise OffloadError(
                f"{what} came back damaged from a file in {self.folder}: checksum {found:08x} in place of {wanted:08x}. Nothing was "
                "computed with it; load a checkpoint, name a folder on another drive in Offload(folder=...), or keep state in host memory. "
                "Whoever writes into state does it by torch (value.mul_(0.5)): what numpy or .data write cannot be told from damage"
            )
