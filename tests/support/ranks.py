"""Gloo ranks that live as long as a test run: `GlooRanks` starts them and asks, this module run by itself is what answers.

python ranks.py WORLD_SIZE FOLDER
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.support.captures import keep_captures

WORLD_SIZE = 4
# Each device mesh and each world leaves process groups behind, with threads and connections: some hundred of them take most of the time.
CALLS_OF_A_POOL = 16


class GlooRanks:
    """Processes in one gloo world, started at first use, and anew after `CALLS_OF_A_POOL` calls.

        results = gloo_ranks.run(function, *args)     # function(*args) on every rank; the results in rank order

    `function` is a top-level function of a test file; it finds its rank by `torch.distributed.get_rank()`.
    """

    def __init__(self, world_size: int = WORLD_SIZE) -> None:
        self._world_size = world_size
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[Connection] = []
        self._num_calls = 0

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        folder = Path(self._directory.name)
        listeners = [Listener(str(folder / f"rank{rank}"), "AF_UNIX") for rank in range(self._world_size)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, str(self._world_size), str(folder)]
        # A session of their own, by which they are killed together.
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        for listener in listeners:
            self._pipes.append(listener.accept())
            listener.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Call `function(*args)` on all ranks. The first rank's exception is raised here, with its traceback as a note."""
        if self._num_calls == CALLS_OF_A_POOL:
            self.stop()
        if self._process is None:
            self._start()
        self._num_calls += 1
        code = sys.modules[function.__module__].__file__
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((code, function.__name__, args)))
        try:
            answers = [self._answer(rank, pipe, timeout) for rank, pipe in enumerate(self._pipes)]
        except (TimeoutError, EOFError):
            self.stop()  # the next test gets ranks that are not stuck in this one
            raise
        for rank, (_, error, trace) in enumerate(answers):
            if error is not None:
                error.add_note(f"on gloo rank {rank}:\n{trace}")
                raise error
        return [result for result, _, _ in answers]

    def _answer(self, rank: int, pipe: Connection, timeout: float) -> tuple[Any, BaseException | None, str]:
        if not pipe.poll(timeout):
            raise TimeoutError(f"gloo rank {rank} gave no answer within {timeout} s")
        return pickle.loads(pipe.recv_bytes())

    def stop(self) -> None:
        """Kill all: they hold nothing, and taking a world down in good order takes ten seconds."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._pipes, self._num_calls = None, [], 0
        if self._directory is not None:
            self._directory.cleanup()


def share(batch: dict[str, Tensor], mesh: object) -> dict[str, Tensor]:
    """This rank's part of the batch, along dp; on a virtual mesh all of it."""
    if not isinstance(mesh, DeviceMesh) or "dp" not in (mesh.mesh_dim_names or ()):
        return batch
    return {name: value.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for name, value in batch.items()}


def fork(world_size: int, folder: Path) -> None:
    """One process a rank; ends when they all have."""
    importlib.import_module("tests.support.models.zoo")  # what most tests import, and what takes longest: once, before they are forked
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
