"""The gloo ranks of the `gloo_ranks` fixture: python gloo_rank.py WORLD_SIZE FOLDER. Imports are made once, before the ranks are forked."""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

import tests.support.models.zoo  # noqa: F401  (what most tests import, and what takes longest)
from tests.support.captures import keep_captures


def fork(world_size: int, folder: Path) -> None:
    """One process a rank; ends when they all have."""
    for rank in range(world_size):
        if os.fork() == 0:
            serve(rank, world_size, folder)
    for _ in range(world_size):
        os.wait()


def serve(rank: int, world_size: int, folder: Path) -> None:
    """Call what arrives, answer with (result, error, traceback), until killed, or the tests are gone."""
    pipe = Client(str(folder / f"rank{rank}"), "AF_UNIX")
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 10, 10)  # as in the tests
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world_size, timeout=timedelta(seconds=180)
    )
    keep_captures()
    modules: dict[str, ModuleType] = {}
    while True:
        code, name, args = pickle.loads(pipe.recv_bytes())
        try:
            answer = pickle.dumps((getattr(_load(code, modules), name)(*args), None, ""))
        except Exception as error:
            answer = _pickled(error)
        pipe.send_bytes(answer)


def _load(code: str, modules: dict[str, ModuleType]) -> ModuleType:
    """The module in file `code`: test files belong to no package, so they are loaded by path."""
    if code not in modules:
        name = f"gloo_{Path(code).stem}"
        spec = importlib.util.spec_from_file_location(name, code)
        assert spec is not None and spec.loader is not None
        modules[code] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[code])
    return modules[code]


def _pickled(error: Exception) -> bytes:
    trace = traceback.format_exc()
    try:
        return pickle.dumps((None, error, trace))
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))


if __name__ == "__main__":
    fork(int(sys.argv[1]), Path(sys.argv[2]))
