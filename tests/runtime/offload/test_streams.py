"""Copies of a GPU on streams that are played here: nothing happens before somebody waits for it, so what is not ordered goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.ir.instructions import Memory
from autopar.runtime.offload.copier import Copier
from autopar.runtime.offload.memories import HostMemory
from autopar.runtime.offload.streams import Streams

CPU = torch.device("cpu")


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.end = stream, len(stream.work)

    def synchronize(self) -> None:
        self.stream.run(self.end)

    def query(self) -> bool:
        return self.stream.done >= self.end


# A worker waits for events, too: what one thread has begun the other must not take for done.
PLAYING = threading.RLock()


class Stream:
    """Does its work as late as it may."""

    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], Any]] = []
        self.done = 0

    def run(self, end: int | None = None) -> None:
        with PLAYING:
            while self.done < (len(self.work) if end is None else end):
                self.done += 1
                self.work[self.done - 1]()

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.work.append(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Cuda:
    Stream = Stream

    def __init__(self) -> None:
        self.computes = self.current = Stream()

    def current_stream(self, device: Any) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Late(Streams):
    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self._cuda.current.work.append(lambda: into.copy_(source))


@pytest.mark.parametrize("memory", ["host", "file"])
def test_copies_and_what_computes_are_in_order(memory: Memory, tmp_path: Path) -> None:
    cuda = Cuda()
    copier = Copier(CPU, str(tmp_path), Late(CPU, cuda))
    back: list[torch.Tensor] = []
    for number in range(5):  # the blocks of each are those of the one before
        tensor = torch.zeros(2000)
        cuda.computes.work.append(lambda tensor=tensor, number=number: tensor.fill_(number))
        departure = copier.park(memory, [tensor], ["h"])
        parked = departure.wait()
        cuda.computes.work.append(tensor.zero_)  # what takes its memory behind the WAIT
        arriving = copier.fetch(parked)
        del departure, parked
        (found,) = arriving.wait()
        result = torch.empty(2000)
        cuda.computes.work.append(lambda result=result, found=found: result.copy_(found))
        back.append(result)
        del arriving, found
    cuda.computes.run()
    assert [each.unique().tolist() for each in back] == [[float(number)] for number in range(5)]


def test_pinned_memory_is_not_filled_anew_under_a_copy() -> None:
    cuda, host = Cuda(), HostMemory(CPU)
    streams, found = Late(CPU, cuda), torch.zeros(100, dtype=torch.uint8)
    block = host.take(100)
    HostMemory.bytes_of(block).fill_(7)
    event = streams.back(block, found)
    address = HostMemory.bytes_of(block).data_ptr()
    del block
    again = host.take(100)
    assert HostMemory.bytes_of(again).data_ptr() == address
    HostMemory.bytes_of(again).fill_(1)
    event.synchronize()
    assert (found == 7).all()


def test_memory_is_held_until_its_copy_is_waited_for_or_over() -> None:
    """Behind the WAIT the stream that computes may have it at once; before that an error may drop it."""
    cuda, host = Cuda(), HostMemory(CPU)
    streams = Late(CPU, cuda)
    waited_for, dropped, next_one = (torch.full((100,), 3, dtype=torch.uint8) for _ in range(3))
    blocks = [host.take(100) for _ in range(3)]
    waits, over = streams.away(waited_for, blocks[0]), streams.away(dropped, blocks[1])
    streams.wait(waits)
    assert [memory is dropped for _, memory in streams._under_way] == [True]
    over.synchronize()
    streams.away(next_one, blocks[2])
    assert [memory is next_one for _, memory in streams._under_way] == [True]
    assert (HostMemory.bytes_of(blocks[1]) == 3).all()
