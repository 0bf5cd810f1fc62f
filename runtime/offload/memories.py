"""Memory of the host that is not the device's, used again from one step to the next."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

from autopar.runtime.offload.worker import Work, at_fork

_PAGE_BYTES = 4096


class Block:
    """A piece of a memory, until nobody holds it.

    place     where: a tensor of bytes, or the offset in a file
    process   whose it is: one that forked off has its own
    checksum  of what was written to a file
    written   what writes it, where that goes on after the WAIT
    uses      events of a GPU: copies that read or fill it, behind which it may be used again
    """

    def __init__(self, place: torch.Tensor | int, num_bytes: int) -> None:
        self.place, self.num_bytes = place, num_bytes
        self.process = os.getpid()
        self.checksum = 0
        self.written: Work | None = None
        self.uses: list[Any] = []


# Memory, and the events behind which it may be used again.
_Place = tuple[torch.Tensor, list[Any]]


def _give_back(back: deque[tuple[_Place, int]], place: _Place, num_bytes: int, process: int) -> None:
    if process == os.getpid():
        back.append((place, num_bytes))


def in_pages(num_bytes: int) -> int:
    """Bytes of whole pages: equal steps find all that they need, and so do steps that differ by little."""
    return -(-max(num_bytes, 1) // _PAGE_BYTES) * _PAGE_BYTES


class Usage:
    """Bytes in use, without what rounding to pages takes, and the most that ever were; `most_pages_bytes` with that."""

    def __init__(self) -> None:
        self.used_bytes = self.peak_bytes = self.pages_bytes = self.most_pages_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self.pages_bytes += in_pages(num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.most_pages_bytes = max(self.most_pages_bytes, self.pages_bytes)

    def subtract(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        self.pages_bytes -= in_pages(num_bytes)


class HostMemory:
    """Memory of the host: pinned where the device is a GPU. Where it is a CPU, whose allocator stands in for the device's, it is not that
    allocator's. What comes back is kept for later, but never so much that more is taken than was once in use at a time: of steps whose
    sizes differ those that were used least lately go.

    used_bytes   what is in use, without what rounding to pages takes
    peak_bytes   the most that ever was
    taken_bytes  what the machine gave and has not got back
    """

    def __init__(self, device: torch.device) -> None:
        self._make: Callable[[int], torch.Tensor] = _pinned if device.type == "cuda" else _mapped
        self._usage, self._taken_bytes = Usage(), 0
        # By size, the one that came back last at the end: places, and the events behind which they are free.
        self._free: OrderedDict[int, deque[_Place]] = OrderedDict()
        # What came back since the last look: a block is let go of in whatever thread, in the middle of anything, so no more is done there.
        self._back: deque[tuple[_Place, int]] = deque()
        self._lock = threading.Lock()
        at_fork(self)

    @property
    def used_bytes(self) -> int:
        return self._seen().used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._usage.peak_bytes

    @property
    def taken_bytes(self) -> int:
        return self._taken_bytes

    def take(self, num_bytes: int) -> Block:
        """Nobody reads or fills it any more, no copy of a GPU either."""
        size = in_pages(num_bytes)
        self._seen()
        with self._lock:
            self._usage.add(num_bytes)
            # The one that came back first: its copies are the likeliest to be over.
            try:
                place, uses = self._free[size].popleft() if self._free.get(size) else (self._made(size), list[Any]())
            except BaseException:
                self._usage.subtract(num_bytes)
                raise
        for each in uses:
            each.synchronize()
        block = Block(place, num_bytes)
        weakref.finalize(block, _give_back, self._back, (place, block.uses), num_bytes, block.process).atexit = False
        return block

    def _made(self, size: int) -> torch.Tensor:
        self._keep(self._usage.most_pages_bytes - size)
        made = self._make(size)
        self._taken_bytes += size
        return made

    def _keep(self, most_bytes: int) -> None:
        """Let go of what came back longest ago until no more than `most_bytes` are taken."""
        while self._taken_bytes > most_bytes and self._free:
            size, places = next(iter(self._free.items()))
            if places:
                for each in places.popleft()[1]:
                    each.synchronize()
                self._taken_bytes -= size
            if not places:
                del self._free[size]

    def _seen(self) -> Usage:
        """Usage, now that what came back is known."""
        with self._lock:
            while self._back:
                (place, uses), num_bytes = self._back.popleft()
                self._usage.subtract(num_bytes)
                self._free.setdefault(place.numel(), deque()).append((place, uses))
                self._free.move_to_end(place.numel())
            return self._usage

    def forked(self) -> None:
        """What the parent has is the parent's: its blocks do not come here."""
        self._lock, self._back, self._free = threading.Lock(), deque(), OrderedDict()
        self._usage, self._taken_bytes = Usage(), 0

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
    # Private: what a process that forks off writes is not seen here.
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
