"""Blocks of host memory: used again once nobody holds them, never more than a step needs, and a fork's are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.runtime.offload.memories import HostMemory
from tests.support.forks import in_a_fork

CPU = torch.device("cpu")


def test_blocks_are_used_again_once_nobody_holds_them() -> None:
    memory = HostMemory(CPU)
    first = memory.take(5000)
    HostMemory.bytes_of(first).fill_(7)
    second = memory.take(10)
    assert (memory.used_bytes, memory.peak_bytes, memory.taken_bytes) == (5010, 5010, 8192 + 4096)
    address = HostMemory.bytes_of(first).data_ptr()
    del first
    third = memory.take(6000)
    assert HostMemory.bytes_of(third).data_ptr() == address and memory.taken_bytes == 8192 + 4096
    assert (memory.used_bytes, memory.peak_bytes) == (6010, 6010)
    del second, third
    assert memory.used_bytes == 0


def test_steps_of_other_sizes_take_no_more_than_one_needs() -> None:
    memory = HostMemory(CPU)
    for number in range(30):
        blocks = [memory.take(4096 * (1 + number % 7 + each)) for each in range(4)]
        del blocks
    assert memory.used_bytes == 0 and memory.taken_bytes <= memory.peak_bytes == 4096 * (7 + 8 + 9 + 10)


def test_what_fails_to_be_taken_is_not_counted() -> None:
    memory = HostMemory(CPU)

    def none(size: int) -> torch.Tensor:
        raise MemoryError

    memory._make = none
    with pytest.raises(MemoryError):
        memory.take(5000)
    assert (memory.used_bytes, memory.taken_bytes) == (0, 0)


def test_copies_under_way_are_over_before_it_is_used_again() -> None:
    class Event:
        is_over = False

        def synchronize(self) -> None:
            self.is_over = True

    memory, event = HostMemory(CPU), Event()
    block = memory.take(10)
    block.uses.append(event)
    del block
    assert not event.is_over
    memory.take(10)
    assert event.is_over


def test_a_fork_writes_to_memory_of_its_own() -> None:
    memory = HostMemory(CPU)
    block, kept = memory.take(10), memory.like(torch.ones(3))
    HostMemory.bytes_of(block).fill_(7)
    free = memory.take(5000)
    HostMemory.bytes_of(free).fill_(5)
    del free

    def in_the_child() -> str:
        assert (memory.used_bytes, memory.taken_bytes) == (0, 0)
        HostMemory.bytes_of(block).fill_(1)
        kept.fill_(2.0)
        HostMemory.bytes_of(memory.take(5000)).fill_(1)
        return f"{memory.used_bytes} {memory.taken_bytes}"

    assert in_a_fork(in_the_child) == "0 8192"
    assert (HostMemory.bytes_of(block) == 7).all() and (kept == 1).all()
    again: Any = memory.take(5000)
    assert (HostMemory.bytes_of(again) == 5).all() and memory.used_bytes == 5010
