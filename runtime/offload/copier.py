"""Who copies: a thread beside the one that computes, and on a GPU a stream for each direction.

COPY takes the memory that it will fill and starts; WAIT blocks on a CPU until it is filled, and on a GPU lets the stream that computes
wait. What is copied is the stretch of memory that all sources of a COPY lie in, once, so that views stay views of one another. What is no
plain tensor, or has no elements, stays where it is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from autopar.errors import OffloadError
from autopar.ir.instructions import Memory
from autopar.runtime.offload.files import FileMemory
from autopar.runtime.offload.layouts import Layout, stretches_of
from autopar.runtime.offload.memories import Block, HostMemory
from autopar.runtime.offload.streams import Streams
from autopar.runtime.offload.worker import Worker, of_another_process

# Lets a WAIT go on: called once.
Finish = Callable[[], Any]


class Parked(NamedTuple):
    """A buffer that is away: in which block of what memory, how it lies there, and what it is in errors; or `kept` as it is. One that is
    the caller's own tensor, of which that is the memory, has both."""

    memory: Memory
    what: str
    block: Block | None = None
    layout: Layout | None = None
    kept: torch.Tensor | None = None


@dataclass(frozen=True)
class Departure:
    """What is being copied away. `wait` gives it; the sources may be dropped then."""

    parked: tuple[Parked, ...]
    finish: Finish
    # What will be on the device.
    tensors: tuple[torch.Tensor, ...] = ()

    def wait(self) -> tuple[Parked, ...]:
        self.finish()
        return self.parked


@dataclass(frozen=True)
class Return:
    """What is being copied back, into memory that is taken already."""

    tensors: tuple[torch.Tensor, ...]
    finish: Finish

    def wait(self) -> tuple[torch.Tensor, ...]:
        self.finish()
        return self.tensors


class Copier:
    """Copies for the ranks of one process. `folder` is where files are. A process that forks off has threads, memory and files of its own;
    what was under way is refused there (`OffloadError`)."""

    def __init__(self, device: torch.device, folder: str | None = None, streams: Streams | None = None) -> None:
        self.device = device
        self.host = HostMemory(device)
        self._folder = folder
        self._file: FileMemory | None = None
        self._worker = Worker("autopar copies")
        self._streams = Streams(device) if streams is None and device.type == "cuda" else streams

    @property
    def file(self) -> FileMemory:
        if self._file is None:
            assert self._folder is not None, "options say where files are"
            self._file = FileMemory(self._folder)
        return self._file

    def park(self, memory: Memory, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> Departure:
        """Start copying `tensors` away; `names` are what errors call them."""
        parked = [Parked(memory, name, kept=tensor) for name, tensor in zip(names, tensors, strict=True)]
        finishes: list[Finish] = []
        for stretch, members in stretches_of(tensors):
            block = (self.file if memory == "file" else self.host).take(stretch.numel())
            finishes.append(self._away(memory, stretch, block, names[members[0][0]]))
            for number, layout in members:
                parked[number] = Parked(memory, names[number], block, layout)
        return Departure(tuple(parked), partial(_all, finishes))

    def fetch(self, parked: Sequence[Parked]) -> Return:
        """Start copying back."""
        stretches: dict[Block, torch.Tensor] = {}
        finishes: list[Finish] = []
        tensors: list[torch.Tensor] = []
        for each in parked:
            if each.block is None or each.layout is None:
                assert each.kept is not None
                tensors.append(each.kept)
                continue
            if each.block.process != os.getpid():
                raise OffloadError(of_another_process(each.what, each.block.process))
            if each.block not in stretches:
                stretches[each.block] = torch.empty(each.block.num_bytes, dtype=torch.uint8, device=self.device)
                finishes.append(self._back(each.memory, each.block, stretches[each.block], each.what))
            tensors.append(each.layout.view(stretches[each.block]))
        return Return(tuple(tensors), partial(_all, finishes))

    def _away(self, memory: Memory, stretch: torch.Tensor, block: Block, what: str) -> Finish:
        if self._streams is not None:
            return self._away_from_gpu(self._streams, memory, stretch, block, what)
        if memory == "file":
            return self._worker.submit(what, self._write, block, stretch, what).result
        return self._worker.submit(what, _fill, block, stretch).result

    def _back(self, memory: Memory, block: Block, stretch: torch.Tensor, what: str) -> Finish:
        if self._streams is not None:
            return self._back_to_gpu(self._streams, memory, block, stretch, what)
        if memory == "file":
            return self._worker.submit(what, self._read, block, stretch, what).result
        return self._worker.submit(what, _empty_into, stretch, block).result

    # What a worker is given holds its block: an error may drop all else before it is over.

    def _write(self, block: Block, stretch: torch.Tensor, what: str) -> None:
        self.file.write(block, stretch.numpy().data, what)

    def _read(self, block: Block, stretch: torch.Tensor, what: str) -> None:
        self.file.read(block, stretch.numpy().data, what)

    # On a GPU files go by way of pinned memory.

    def _away_from_gpu(self, streams: Streams, memory: Memory, stretch: torch.Tensor, block: Block, what: str) -> Finish:
        pinned = self.host.take(stretch.numel()) if memory == "file" else block
        copied = streams.away(stretch, pinned)

        def write() -> None:
            copied.synchronize()
            self._write(block, HostMemory.bytes_of(pinned), what)

        if memory == "file":
            block.written = self._worker.submit(what, write)  # whoever reads it hears of what went wrong
        return partial(streams.wait, copied)

    def _back_to_gpu(self, streams: Streams, memory: Memory, block: Block, stretch: torch.Tensor, what: str) -> Finish:
        if memory == "host":
            return partial(streams.wait, streams.back(block, stretch))
        pinned, written = self.host.take(stretch.numel()), block.written
        assert written is not None

        def read() -> None:
            written.result()
            self._read(block, HostMemory.bytes_of(pinned), what)

        arrived = self._worker.submit(what, read)

        def finish() -> None:
            arrived.result()
            streams.wait(streams.back(pinned, stretch))

        return finish


_COPIERS: weakref.WeakKeyDictionary[Any, dict[object, Copier]] = weakref.WeakKeyDictionary()


def copier_of(owner: Any, device: torch.device, folder: str | None = None) -> Copier:
    """One for each `owner` and device, as long as the owner is there: its memory is used again at every step."""
    known = _COPIERS.setdefault(owner, {})
    if (device, folder) not in known:
        known[device, folder] = Copier(device, folder)
    return known[device, folder]


def _all(finishes: Sequence[Finish]) -> None:
    for each in finishes:
        each()


# By numpy: torch would use all cores, those that compute among them.


def _fill(block: Block, stretch: torch.Tensor) -> None:
    HostMemory.bytes_of(block).numpy()[:] = stretch.numpy()


def _empty_into(stretch: torch.Tensor, block: Block) -> None:
    stretch.numpy()[:] = HostMemory.bytes_of(block).numpy()
