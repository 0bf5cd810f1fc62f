"""Gloo ranks that live as long as a test run: `GlooRanks` starts them and asks, this module run by itself is what answers.

python ranks.py WORLD_SIZE    reads folders, one a line, and forks ranks that meet there

What all ranks need is imported, and has run once, before they are forked.
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

from tests.support.captures import compiled, keep_captures

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
        self._forker: subprocess.Popen[str] | None = None
        self._world = 0  # the process group of the ranks alive
        self._pipes: list[Connection] = []
        self._num_calls = 0

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        folder = Path(self._directory.name)
        listeners = [Listener(str(folder / f"rank{rank}"), "AF_UNIX") for rank in range(self._world_size)]
        forker = self._forker = self._forker or self._new_forker()
        assert forker.stdin is not None and forker.stdout is not None
        forker.stdin.write(f"{folder}\n")
        forker.stdin.flush()
        self._world = int(forker.stdout.readline())
        for listener in listeners:
            self._pipes.append(listener.accept())
            listener.close()

    def _new_forker(self) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, str(self._world_size)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Call `function(*args)` on all ranks. The first rank's exception is raised here, with its traceback as a note."""
        if self._num_calls == CALLS_OF_A_POOL:
            self._kill()
        if not self._world:
            self._start()
        self._num_calls += 1
        code = sys.modules[function.__module__].__file__
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((code, function.__name__, args)))
        try:
            answers = [self._answer(rank, pipe, timeout) for rank, pipe in enumerate(self._pipes)]
        except (TimeoutError, EOFError):
            self._kill()  # the next test gets ranks that are not stuck in this one
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

    def _kill(self) -> None:
        """Kill the ranks: they hold nothing, and taking a world down in good order takes ten seconds."""
        if self._world:
            os.killpg(self._world, signal.SIGKILL)
        self._world, self._pipes, self._num_calls = 0, [], 0
        if self._directory is not None:
            self._directory.cleanup()

    def stop(self) -> None:
        """Kill the ranks, and end what forks them."""
        self._kill()
        if self._forker is not None and self._forker.stdin is not None:
            self._forker.stdin.close()
            self._forker.wait()
        self._forker = None


def share(batch: dict[str, Tensor], mesh: object) -> dict[str, Tensor]:
    """This rank's part of the batch, along dp; on a virtual mesh all of it."""
    if not isinstance(mesh, DeviceMesh) or "dp" not in (mesh.mesh_dim_names or ()):
        return batch
    return {name: value.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for name, value in batch.items()}


def fork(world_size: int) -> None:
    """For each folder that comes in: one process a rank, in a process group of their own, whose number is printed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    out = os.dup(1)
    os.dup2(2, 1)  # what ranks print is no answer
    zoo = importlib.import_module("tests.support.models.zoo")
    torch.set_num_threads(1)
    # With torch's builds for GPUs no process runs a backward that is forked from one which has traced one.
    if torch.version.cuda is None:
        case = zoo.gpt2()
        compiled(case.model, {"dp": 2, "tp": 2}, case.batch)(**case.batch).loss.backward()
    for line in sys.stdin:
        first = 0
        for rank in range(world_size):
            process = os.fork()
            os.setpgid(process, first)
            if process == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(rank, world_size, Path(line.strip()))
            first = first or process
        os.write(out, f"{first}\n".encode())


def serve(rank: int, world_size: int, folder: Path) -> None:
    """Call what arrives, answer with (result, error, traceback), until killed, or the tests are gone."""
    pipe = Client(str(folder / f"rank{rank}"), "AF_UNIX")
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 10, 10)  # as in the tests
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ["AUTOPAR_RECORDER"] = str(folder / "recorder")  # what is killed leaves no temporary folder behind
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
    fork(int(sys.argv[1]))
