"""Four gloo ranks that live as long as the test run, shared by all folders."""

from __future__ import annotations

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

from tests.captures import keep_captures

WORLD_SIZE = 4
_SERVER = Path(__file__).with_name("gloo_rank.py")


class GlooRanks:
    """Processes in one gloo world, started at first use and kept.

        results = gloo_ranks.run(function, *args)     # function(*args) on every rank; the results in rank order

    `function` is a top-level function of a test file; it finds its rank by `torch.distributed.get_rank()`.
    """

    def __init__(self, world_size: int = WORLD_SIZE) -> None:
        self._world_size = world_size
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        folder = Path(self._directory.name)
        listeners = [Listener(str(folder / f"rank{rank}"), "AF_UNIX") for rank in range(self._world_size)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        for rank in range(self._world_size):
            command = [sys.executable, str(_SERVER), str(rank), str(self._world_size), str(folder)]
            self._processes.append(subprocess.Popen(command, env=environment))
        for listener in listeners:
            self._pipes.append(listener.accept())
            listener.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Call `function(*args)` on all ranks. The first rank's exception is raised here, with its traceback as a note."""
        if not self._processes:
            self._start()
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
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._pipes = [], []
        if self._directory is not None:
            self._directory.cleanup()


@pytest.fixture(scope="session", autouse=True)
def captures() -> None:
    keep_captures()


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[GlooRanks]:
    ranks = GlooRanks()
    yield ranks
    ranks.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group for all users of the ranks, and one for each file, whose tests share fixtures and caches.

    xdist (--dist loadgroup) runs a group in one process. Before xdist reads the marks.
    """
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        group = "gloo" if "gloo_ranks" in getattr(item, "fixturenames", ()) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
