"""Memory that is not the device's: of the host, kept from one step to the next, and in a file without a name."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from autopar.errors import OffloadError
from autopar.ir.units import in_bytes

_PAGE_BYTES = 4096


class Block:
    """A piece of a memory, until nobody holds it. `place` is where: a tensor of bytes, or the offset in a file."""

    def __init__(self, place: torch.Tensor | int, num_bytes: int) -> None:
        self.place, self.num_bytes = place, num_bytes
        self.checksum = 0
        # What writes it, where that goes on after the WAIT.
        self.written: Future[None] | None = None


class _Blocks:
    """Hands out blocks, those that came back first. Sizes are those of pages, so that equal steps find all that they need."""

    def __init__(self, make: Callable[[int], torch.Tensor | int]) -> None:
        self._make = make
        self._free: defaultdict[int, list[torch.Tensor | int]] = defaultdict(list)
        # A block may come back while another is taken, from whatever thread lets go of it.
        self._lock = threading.RLock()
        self.used_bytes = self.peak_bytes = self.taken_bytes = 0

    def take(self, num_bytes: int) -> Block:
        size = -(-max(num_bytes, 1) // _PAGE_BYTES) * _PAGE_BYTES
        with self._lock:
            free = self._free[size]
            if free:
                place = free.pop()
            else:
                place = self._make(size)
                self.taken_bytes += size
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        block = Block(place, num_bytes)
        weakref.finalize(block, self._give_back, place, size, num_bytes).atexit = False
        return block

    def _give_back(self, place: torch.Tensor | int, size: int, num_bytes: int) -> None:
        with self._lock:
            self._free[size].append(place)
            self.used_bytes -= num_bytes


class HostMemory:
    """Memory of the host: pinned where the device is a GPU. Where it is a CPU, whose allocator stands in for the device's, it is not that
    allocator's. What was taken once is kept for later steps.

    used_bytes   what is in use, without what rounding to pages takes
    peak_bytes   the most that ever was
    taken_bytes  what the machine gave
    """

    def __init__(self, device: torch.device) -> None:
        self._make = _pinned if device.type == "cuda" else _mapped
        self._blocks = _Blocks(self._make)

    @property
    def used_bytes(self) -> int:
        return self._blocks.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._blocks.peak_bytes

    @property
    def taken_bytes(self) -> int:
        return self._blocks.taken_bytes

    def take(self, num_bytes: int) -> Block:
        return self._blocks.take(num_bytes)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on the host, contiguous, in memory of its own for good."""
        made = self._make(max(tensor.nbytes, 1))[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return made.copy_(tensor)

    @staticmethod
    def bytes_of(block: Block) -> torch.Tensor:
        """The block as a tensor of bytes, on the host."""
        assert isinstance(block.place, torch.Tensor)
        return block.place[: block.num_bytes]


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _mapped(size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class FileMemory:
    """A file in `folder` that has no name from the start, so that nothing is left when its process ends, however it does.

    Whatever is read is compared with what was written, by a checksum (CRC-32, which no flipped byte passes).
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self._file = _nameless(self.folder)
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._blocks = _Blocks(self._append)

    @property
    def used_bytes(self) -> int:
        return self._blocks.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._blocks.peak_bytes

    def take(self, num_bytes: int) -> Block:
        return self._blocks.take(num_bytes)

    def _append(self, size: int) -> int:
        begin, self._end = self._end, self._end + size
        return begin

    def write(self, block: Block, data: memoryview, what: str) -> None:
        """Raises `OffloadError` where there is no room, naming `what` it was."""
        assert isinstance(block.place, int)
        block.checksum = zlib.crc32(data)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], block.place + done)
        except OSError as error:
            raise OffloadError(
                f"{what} of {in_bytes(len(data))} cannot be written to a file in {self.folder}, which has {in_bytes(self._end)} so far: "
                f"{error.strerror}; make room, name another folder in Offload(folder=...), or offload to host memory"
            ) from error

    def read(self, block: Block, data: memoryview, what: str) -> None:
        """Into `data`. Raises `OffloadError` where other bytes come back than were written, naming `what` they were."""
        assert isinstance(block.place, int)
        done = 0
        while done < len(data) and (number := os.preadv(self._file, [data[done:]], block.place + done)):
            done += number
        found = zlib.crc32(data)
        if done < len(data) or found != block.checksum:
            got = f"{done} of {len(data)} bytes" if done < len(data) else f"checksum {found:08x} in place of {block.checksum:08x}"
            raise OffloadError(
                f"{what} came back damaged from a file in {self.folder}: {got}. Nothing was computed with it; name a folder on another "
                "drive in Offload(folder=...), or offload to host memory"
            )


def _nameless(folder: str) -> int:
    """A file descriptor. Where the file system has no nameless files, its name is gone before anything is written."""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    file, path = tempfile.mkstemp(prefix="autopar-", dir=folder)
    os.unlink(path)
    return file
