"""A file without a name, of which blocks are handed out."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
import zlib
from bisect import insort
from collections import deque
from pathlib import Path

from autopar.errors import OffloadError
from autopar.ir.units import in_bytes
from autopar.runtime.offload.memories import Block, Usage, in_pages
from autopar.runtime.offload.worker import at_fork, of_another_process


class FileMemory:
    """A file in `folder` that has no name from the start, so that nothing is left when its process ends, however it does.

    Whatever is read is compared with what was written, by a checksum (CRC-32, which no flipped byte passes). Between steps, when nothing
    is in use, the file is as long as the most that was in use at a time. A process that forks off has a file of its own.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self._usage = Usage()
        # What is free before the end, as (begin, end), in order; neighbours are one.
        self._holes: list[tuple[int, int]] = []
        self._end = 0
        # What came back since the last look: a block is let go of in whatever thread, in the middle of anything, so no more is done there.
        self._back: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._open()
        at_fork(self)

    def _open(self) -> None:
        self._file = nameless(self.folder)
        self._close = weakref.finalize(self, os.close, self._file)

    @property
    def used_bytes(self) -> int:
        return self._seen().used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._usage.peak_bytes

    @property
    def taken_bytes(self) -> int:
        """How long the file is."""
        self._seen()
        return self._end

    def take(self, num_bytes: int) -> Block:
        self._seen()
        with self._lock:
            if not self._close.alive:
                self._open()
            self._usage.add(num_bytes)
            begin = self._begin(in_pages(num_bytes))
        block = Block(begin, num_bytes)
        weakref.finalize(block, _give_back, self._back, begin, num_bytes, block.process).atexit = False
        return block

    def _begin(self, size: int) -> int:
        """Of the smallest hole that it fits into, else of what the file is longer then."""
        fitting = [each for each in self._holes if each[1] - each[0] >= size]
        if fitting:
            begin, end = min(fitting, key=lambda each: each[1] - each[0])
            self._holes.remove((begin, end))
            if begin + size < end:
                insort(self._holes, (begin + size, end))
            return begin
        begin = self._holes.pop()[0] if self._holes and self._holes[-1][1] == self._end else self._end
        self._end = begin + size
        return begin

    def _seen(self) -> Usage:
        """Usage, now that what came back is known."""
        with self._lock:
            is_changed = bool(self._back)
            while self._back:
                begin, num_bytes = self._back.popleft()
                self._usage.subtract(num_bytes)
                insort(self._holes, (begin, begin + in_pages(num_bytes)))
            if is_changed:
                self._holes = _joined(self._holes)
                if not self._usage.pages_bytes and self._end > self._usage.most_pages_bytes:
                    self._end = self._usage.most_pages_bytes
                    self._holes = [(0, self._end)]
                    os.ftruncate(self._file, self._end)
            return self._usage

    def forked(self) -> None:
        """The parent's file is the parent's; its blocks do not come here."""
        self._close()
        self._lock, self._back, self._holes, self._end, self._usage = threading.Lock(), deque(), [], 0, Usage()

    def write(self, block: Block, data: memoryview, what: str) -> None:
        """Raises `OffloadError` where there is no room, naming `what` it was."""
        file = self._file_of(block, what)
        assert isinstance(block.place, int)
        block.checksum = zlib.crc32(data)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(file, data[done:], block.place + done)
        except OSError as error:
            raise OffloadError(
                f"{what} of {in_bytes(len(data))} cannot be written to a file in {self.folder}, which has {in_bytes(self._end)} so far: "
                f"{error.strerror}; make room, name another folder in Offload(folder=...), or offload to host memory"
            ) from error

    def read(self, block: Block, data: memoryview, what: str) -> None:
        """Into `data`. Raises `OffloadError` where other bytes come back than were written, naming `what` they were."""
        file = self._file_of(block, what)
        assert isinstance(block.place, int)
        done, problem = 0, ""
        try:
            while done < len(data) and (number := os.preadv(file, [data[done:]], block.place + done)):
                done += number
        except OSError as error:
            problem = f", {error.strerror}"
        found = zlib.crc32(data)
        if done < len(data) or found != block.checksum:
            got = f"{done} of {len(data)} bytes{problem}" if done < len(data) else f"checksum {found:08x} in place of {block.checksum:08x}"
            raise OffloadError(
                f"{what} came back damaged from a file in {self.folder}: {got}. Nothing was computed with it; name a folder on another "
                "drive in Offload(folder=...), or offload to host memory"
            )

    def _file_of(self, block: Block, what: str) -> int:
        if block.process != os.getpid():
            raise OffloadError(of_another_process(what, block.process))
        return self._file


def _give_back(back: deque[tuple[int, int]], begin: int, num_bytes: int, process: int) -> None:
    if process == os.getpid():
        back.append((begin, num_bytes))


def _joined(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in holes:
        found.append((found.pop()[0] if found and found[-1][1] == begin else begin, end))
    return found


def nameless(folder: str) -> int:
    """A file descriptor. Where the file system has no nameless files, its name is gone before anything is written."""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    file, path = tempfile.mkstemp(prefix="autopar-", dir=folder)
    os.unlink(path)
    return file
