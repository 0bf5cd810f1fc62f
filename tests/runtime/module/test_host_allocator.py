"""Steps on a CPU take no pages from the system that they gave back before; what the environment says of that holds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

from autopar.runtime.module import host_allocator
from autopar.runtime.module.host_allocator import FreedMemory

_STEPS = """
import resource, torch, autopar
from autopar.runtime.module.host_allocator import keep_freed_memory

# Each of its values has a MiB, and all are freed between two steps.
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
batch = torch.ones(4096, 64)
parallel = autopar.compile(model, autopar.virtual_mesh(dp=1), backend="eager")
faults = []
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parallel(batch).sum().backward()
    parallel.zero_grad()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[2:]), keep_freed_memory())
"""


def faults_of_a_step(environment: Mapping[str, str]) -> tuple[int, bool]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run([sys.executable, "-c", _STEPS], env={**clean, **environment}, check=True, capture_output=True, text=True)
    number, is_kept = run.stdout.split()[-2:]
    return int(number), is_kept == "True"


IS_GLIBC = platform.libc_ver()[0] == "glibc"


def test_a_step_takes_no_new_pages() -> None:
    number, is_kept = faults_of_a_step({})
    assert is_kept == IS_GLIBC
    assert number < 1024 or not IS_GLIBC, "a quarter of what it takes otherwise: where the heap lies it may grow by a value still"


def test_what_the_environment_says_holds() -> None:
    number, is_kept = faults_of_a_step({"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"})
    assert not is_kept
    assert number > 4096 or not IS_GLIBC, "all 16 MiB, and more"


def test_the_first_calls_behind_a_compile_begin_with_nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []

    class Library:
        @staticmethod
        def malloc_trim(pad: int) -> None:
            trims.append(pad)

    monkeypatch.setattr(host_allocator, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(host_allocator.ctypes, "CDLL", lambda name: Library)
    freed = FreedMemory()
    freed.begin_call()
    assert not trims, "nothing has been compiled for this device"
    for _ in range(2):
        freed.keep()
        trims.clear()
        for _ in range(6):
            freed.begin_call()
        assert trims == [0] * 4
