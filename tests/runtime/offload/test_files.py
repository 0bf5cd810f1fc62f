"""Blocks of a file without a name: used again, nothing is left behind, no flipped byte passes, and forks have files of their own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import OffloadError
from autopar.runtime.offload.files import FileMemory
from tests.support.forks import in_a_fork


def data(text: bytes) -> memoryview:
    return memoryview(bytearray(text))


def test_a_file_gives_back_what_was_written_and_has_no_name(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path)
    blocks = {text: memory.take(len(text)) for text in (b"one", b"another")}
    for text, block in blocks.items():
        memory.write(block, data(text), "x")
    assert list(tmp_path.iterdir()) == []
    for text, block in blocks.items():
        found = data(b" " * len(text))
        memory.read(block, found, "x")
        assert bytes(found) == text


def test_without_nameless_files_the_name_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    memory = FileMemory(tmp_path)
    assert list(tmp_path.iterdir()) == []
    block = memory.take(3)
    memory.write(block, data(b"one"), "x")
    found = data(b"   ")
    memory.read(block, found, "x")
    assert bytes(found) == b"one"


def test_a_flipped_byte_is_refused_by_name(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path)
    block = memory.take(8)
    memory.write(block, data(b"12345678"), "buffer h_3@2 of rank 1")
    os.pwrite(memory._file, b"x", 5)
    with pytest.raises(OffloadError, match=rf"buffer h_3@2 of rank 1 came back damaged from a file in {tmp_path}: checksum"):
        memory.read(block, data(b"        "), "buffer h_3@2 of rank 1")
    os.ftruncate(memory._file, 3)
    with pytest.raises(OffloadError, match="3 of 8 bytes"):
        memory.read(block, data(b"        "), "x")


def test_a_drive_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FileMemory(tmp_path)
    block = memory.take(8)
    memory.write(block, data(b"12345678"), "h")

    def gone(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", gone)
    with pytest.raises(OffloadError, match="h came back damaged .*: 0 of 8 bytes, Input/output error"):
        memory.read(block, data(b"        "), "h")


def test_a_full_drive_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FileMemory(tmp_path)
    block = memory.take(8)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OffloadError, match=r"h of 8 B cannot be written .*No space left on device; make room"):
        memory.write(block, data(b"12345678"), "h")


def test_the_file_is_no_longer_than_a_step_needs(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path)
    for number in range(50):  # sizes of every step differ
        blocks = [memory.take(4096 * (1 + (number * 7 + each * 5) % 13)) for each in range(8)]
        for block in blocks:
            memory.write(block, memoryview(bytes(block.num_bytes)), "x")
        assert len({block.place for block in blocks}) == len(blocks)
        del blocks[::2], block  # not in the order in which they came
        blocks += [memory.take(4096) for _ in range(3)]
        del blocks
        assert memory.used_bytes == 0 and memory.taken_bytes <= memory.peak_bytes
        assert os.fstat(memory._file).st_size <= memory.peak_bytes


def test_a_fork_has_a_file_of_its_own(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path)
    block, found = memory.take(8), data(b"        ")
    memory.write(block, data(b"parental"), "h")
    inherited = memory._file

    def in_the_child() -> str:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(inherited)
        with pytest.raises(OffloadError, match="h is of process .* forked off in the middle of a step"):
            memory.read(block, data(b"        "), "h")
        blocks = [memory.take(8) for _ in range(4)]
        for each in blocks:
            memory.write(each, data(b"children"), "x")
        mine = data(b"        ")
        memory.read(blocks[0], mine, "x")
        assert list(tmp_path.iterdir()) == []
        return bytes(mine).decode()

    assert in_a_fork(in_the_child) == "children"
    memory.read(block, found, "h")
    assert bytes(found) == b"parental"


WRITES = """
import sys, time
from autopar.runtime.offload.files import FileMemory
memory, blocks = FileMemory(sys.argv[1]), []
print("ready", flush=True)
while True:
    blocks.append(memory.take(1 << 20))
    memory.write(blocks[-1], memoryview(bytes(1 << 20)), "x")
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_whoever_is_killed_leaves_nothing(tmp_path: Path) -> None:
    for number in range(20):
        process = subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE)
        if number:  # the first is killed before it is ready
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(0.002 * number)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close() if process.stdout else None
        assert list(tmp_path.iterdir()) == []
