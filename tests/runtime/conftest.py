"""Four gloo ranks that live as long as the test run."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

WORLD_SIZE = 4
_SERVER = Path(__file__).with_name("gloo_rank.py")
sys.path.insert(0, str(_SERVER.parent))  # for `schedules`; the ranks find it beside their script


class GlooRanks:
    """Four processes in one gloo world, started at first use and kept.

        results = gloo_ranks.run(function, *args)     # function(*args) on every rank; the results in rank order

    `function` is a top-level function of a test file; it finds its rank by `torch.distributed.get_rank()`.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        folder = Path(self._directory.name)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        listeners = [Listener(str(folder / f"rank{rank}"), "AF_UNIX") for rank in range(WORLD_SIZE)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        for rank in range(WORLD_SIZE):
            command = [sys.executable, str(_SERVER), str(rank), str(WORLD_SIZE), str(folder)]
            self._processes.append(subprocess.Popen(command, env=environment))
        for listener in listeners:
            self._pipes.append(listener.accept())
            listener.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `function(*args)` on all ranks. The first rank's exception is raised here, with its traceback as a note."""
        code = sys.modules[function.__module__].__file__
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((code, function.__name__, args)))
        answers = [self._answer(rank, pipe, timeout) for rank, pipe in enumerate(self._pipes)]
        for rank, (_, error, trace) in enumerate(answers):
            if error is not None:
                error.add_note(f"on gloo rank {rank}:\n{trace}")
                raise error
        return [result for result, _, _ in answers]

    def _answer(self, rank: int, pipe: Connection, timeout: float) -> tuple[Any, BaseException | None, str]:
        if not pipe.poll(timeout):
            raise TimeoutError(f"gloo rank {rank} gave no answer within {timeout} s")
        return pickle.loads(pipe.recv_bytes())

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._directory.cleanup()


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[GlooRanks]:
    ranks = GlooRanks()
    yield ranks
    ranks.close()
