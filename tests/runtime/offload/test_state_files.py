"""State of an optimizer in mapped files: tensors like any other, sealed, without a name, and gone with their process."""

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
import torch

from autopar.errors import OffloadError
from autopar.runtime.offload.state_files import StateFiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_that_is_written_like_any_other(tmp_path: Path, dtype: torch.dtype) -> None:
    files, tensor = StateFiles(tmp_path), torch.arange(12).reshape(3, 4).t().to(dtype)
    found = files.like(tensor)
    assert torch.equal(found, tensor) and found.is_contiguous() and not list(tmp_path.iterdir())
    files.check(found, files.seal(found), "it")
    found.zero_()
    assert torch.equal(found, torch.zeros_like(tensor)) and files.like(torch.empty(0, 3)).shape == (0, 3)


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [StateFiles(tmp_path).like(torch.ones(5)) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before and len(kept) == 20


def test_damage_is_told_from_what_somebody_writes(tmp_path: Path) -> None:
    files, found = StateFiles(tmp_path), StateFiles(tmp_path).like(torch.ones(5))
    seal = files.seal(found)
    found.mul_(0.5)
    files.check(found, seal, "exp_avg")
    seal = files.seal(found)
    found.numpy()[2] = 7.0
    with pytest.raises(OffloadError, match=rf"exp_avg came back damaged from a file in {tmp_path}: checksum .* in place of"):
        files.check(found, seal, "exp_avg")


def test_a_full_drive_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"of 20 B cannot be written .*No space left on device; make room"):
        StateFiles(tmp_path).like(torch.ones(5))


TRAINS = """
import sys, torch
from autopar.runtime.offload.memories import HostMemory
from autopar.runtime.offload.state_files import StateFiles
from autopar.runtime.train.host_step import HostStep
parameters = [torch.nn.Parameter(torch.ones(1 << 16)) for _ in range(8)]
part = HostStep(torch.optim.AdamW(parameters), "element", HostMemory(torch.device("cpu")), StateFiles(sys.argv[1]))
print("ready", flush=True)
while True:
    for each in parameters:
        each.grad = torch.ones_like(each)
    part.step(parameters)
    part.finish()
"""


@pytest.mark.slow
def test_whoever_is_killed_leaves_nothing(tmp_path: Path) -> None:
    for number in range(8):
        process = subprocess.Popen([sys.executable, "-c", TRAINS, str(tmp_path)], stdout=subprocess.PIPE)
        if number:  # the first is killed before it is ready
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(0.003 * number)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close() if process.stdout else None
        assert list(tmp_path.iterdir()) == []
