"""Who copies: a thread beside the one that computes, and on a GPU a stream for each direction.

COPY takes the memory that it will fill and starts; WAIT blocks on a CPU until it is filled, and on a GPU lets the stream that computes
wait. What is copied is the stretch of memory that all sources of a COPY lie in, once, so that views stay views of one another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from autopar.ir.instructions import Memory
from autopar.runtime.offload.memories import Block, FileMemory, HostMemory

# Where a stretch begins in its storage, so that what begins aligned comes back so.
_ALIGNMENT_BYTES = 64


class _Layout(NamedTuple):
    """How a tensor lies in a stretch of memory; the offset in elements."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def view(self, stretch: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=stretch.device)
        return empty.set_(stretch.untyped_storage(), self.offset, self.shape, self.strides)


class Parked(NamedTuple):
    """A buffer that is away: in which block of what memory, how it lies there, and what it is in errors."""

    memory: Memory
    block: Block
    layout: _Layout
    what: str


@dataclass(frozen=True)
class Departure:
    """What is being copied away. `wait` gives it; the sources may be dropped then."""

    parked: tuple[Parked, ...]
    finish: Callable[[], Any]
    tensors: tuple[torch.Tensor, ...] = ()

    def wait(self) -> tuple[Parked, ...]:
        self.finish()
        return self.parked


@dataclass(frozen=True)
class Return:
    """What is being copied back, into memory that is taken already."""

    tensors: tuple[torch.Tensor, ...]
    finish: Callable[[], Any]

    def wait(self) -> tuple[torch.Tensor, ...]:
        self.finish()
        return self.tensors


class Copier:
    """Copies for the ranks of one process. `folder` is where files are."""

    def __init__(self, device: torch.device, folder: str | None = None) -> None:
        self.device = device
        self.host = HostMemory(device)
        self._folder = folder
        self._file: FileMemory | None = None
        self._thread = ThreadPoolExecutor(1, "autopar copies")
        self._streams: dict[str, Any] = {}

    @property
    def file(self) -> FileMemory:
        if self._file is None:
            assert self._folder is not None, "options say where files are"
            self._file = FileMemory(self._folder)
        return self._file

    def park(self, memory: Memory, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> Departure:
        """Start copying `tensors` away; `names` are what errors call them."""
        stretches, parked = _stretches(tensors), [None] * len(tensors)
        finishes: list[Callable[[], Any]] = []
        for stretch, members in stretches:
            block = (self.file if memory == "file" else self.host).take(stretch.numel())
            what = names[members[0][0]]
            finishes.append(self._away(memory, stretch, block, what))
            for number, layout in members:
                parked[number] = Parked(memory, block, layout, names[number])  # pyright: ignore[reportArgumentType, reportCallIssue]
        return Departure(tuple(each for each in parked if each is not None), partial(_all, finishes))

    def fetch(self, parked: Sequence[Parked]) -> Return:
        """Start copying back."""
        stretches: dict[int, torch.Tensor] = {}
        finishes: list[Callable[[], Any]] = []
        for each in parked:
            if id(each.block) not in stretches:
                stretch = torch.empty(each.block.num_bytes, dtype=torch.uint8, device=self.device)
                stretches[id(each.block)] = stretch
                finishes.append(self._back(each, stretch))
        return Return(tuple(each.layout.view(stretches[id(each.block)]) for each in parked), partial(_all, finishes))

    def _away(self, memory: Memory, stretch: torch.Tensor, block: Block, what: str) -> Callable[[], Any]:
        if self.device.type == "cuda":
            return self._away_from_gpu(memory, stretch, block, what)
        if memory == "file":
            return self._thread.submit(self.file.write, block, _bytes(stretch), what).result
        return self._thread.submit(_copy, self.host.bytes_of(block), stretch).result

    def _back(self, parked: Parked, stretch: torch.Tensor) -> Callable[[], Any]:
        if self.device.type == "cuda":
            return self._back_to_gpu(parked, stretch)
        if parked.memory == "file":
            return self._thread.submit(self.file.read, parked.block, _bytes(stretch), parked.what).result
        return self._thread.submit(_copy, stretch, self.host.bytes_of(parked.block)).result

    # On a GPU each direction has a stream; files go by way of pinned memory.

    def _away_from_gpu(self, memory: Memory, stretch: torch.Tensor, block: Block, what: str) -> Callable[[], Any]:
        pinned = self.host.take(stretch.numel()) if memory == "file" else block
        copied = self._on_stream("away", lambda: self.host.bytes_of(pinned).copy_(stretch, non_blocking=True))

        def write() -> None:
            copied.synchronize()
            self.file.write(block, _bytes(self.host.bytes_of(pinned)), what)

        if memory == "file":
            block.written = self._thread.submit(write)  # whoever reads it hears of what went wrong
        return lambda: torch.cuda.current_stream(self.device).wait_event(copied)

    def _back_to_gpu(self, parked: Parked, stretch: torch.Tensor) -> Callable[[], Any]:
        if parked.memory == "host":
            pinned = self.host.bytes_of(parked.block)
            copied = self._on_stream("back", lambda: stretch.copy_(pinned, non_blocking=True))
            return lambda: torch.cuda.current_stream(self.device).wait_event(copied)
        block = self.host.take(stretch.numel())
        written: Future[None] | None = parked.block.written

        def read() -> None:
            assert written is not None
            written.result()
            self.file.read(parked.block, _bytes(self.host.bytes_of(block)), parked.what)

        arrived = self._thread.submit(read)

        def finish() -> None:
            arrived.result()
            copied = self._on_stream("back", lambda: stretch.copy_(self.host.bytes_of(block), non_blocking=True))
            torch.cuda.current_stream(self.device).wait_event(copied)

        return finish

    def _on_stream(self, direction: str, copy: Callable[[], Any]) -> Any:
        """Run `copy` behind all that computes so far; the event of its end."""
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(self.device)
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            copy()
            return stream.record_event()


_COPIERS: weakref.WeakKeyDictionary[Any, dict[object, Copier]] = weakref.WeakKeyDictionary()


def copier_of(owner: Any, device: torch.device, folder: str | None = None) -> Copier:
    """One for each `owner` and device, as long as the owner is there: its memory is used again at every step."""
    known = _COPIERS.setdefault(owner, {})
    if (device, folder) not in known:
        known[device, folder] = Copier(device, folder)
    return known[device, folder]


def _all(finishes: Sequence[Callable[[], Any]]) -> None:
    for each in finishes:
        each()


def _stretches(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, list[tuple[int, _Layout]]]]:
    """Each memory that some of `tensors` lie in, as bytes from the first that they use to the last, and how which of them lie there."""
    by_storage: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    found: list[tuple[torch.Tensor, list[tuple[int, _Layout]]]] = []
    for numbers in by_storage.values():
        spans = [_span(tensors[number]) for number in numbers]
        begin, end = min(begin for begin, _ in spans) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, max(end for _, end in spans)
        first = tensors[numbers[0]]
        empty = torch.empty(0, dtype=torch.uint8, device=first.device)
        stretch = empty.set_(first.untyped_storage(), begin, (end - begin,), (1,))
        members: list[tuple[int, _Layout]] = []
        for number in numbers:
            each = tensors[number]
            offset = int(each.storage_offset()) - begin // each.dtype.itemsize
            members.append((number, _Layout(each.dtype, each.shape, each.stride(), offset)))
        found.append((stretch, members))
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and that behind the last."""
    begin = int(tensor.storage_offset())
    last = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.dtype.itemsize, (last + 1 if tensor.numel() else begin) * tensor.dtype.itemsize


def _bytes(stretch: torch.Tensor) -> memoryview:
    return stretch.numpy().data


def _copy(into: torch.Tensor, stretch: torch.Tensor) -> None:
    # By numpy: torch would use all cores, those that compute among them.
    into.numpy()[:] = stretch.numpy()
