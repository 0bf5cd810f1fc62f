"""Four gloo ranks that live as long as the test run, shared by all folders."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.captures import keep_captures

WORLD_SIZE = 4
_GLOO, _FIXTURE = "gloo", "gloo_ranks"
_SERVER = Path(__file__).parent / "support" / "gloo_rank.py"

# Traces make objects by the million and keep most of them: a fifth of the suite's time was collections.
gc.set_threshold(20_000, 10, 10)


class GlooRanks:
    """Processes in one gloo world, started at first use and kept.

        results = gloo_ranks.run(function, *args)     # function(*args) on every rank; the results in rank order

    `function` is a top-level function of a test file; it finds its rank by `torch.distributed.get_rank()`.
    """

    def __init__(self, world_size: int = WORLD_SIZE) -> None:
        self._world_size = world_size
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        folder = Path(self._directory.name)
        listeners = [Listener(str(folder / f"rank{rank}"), "AF_UNIX") for rank in range(self._world_size)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(_SERVER), str(self._world_size), str(folder)]
        # A session of their own, by which they are killed together.
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        for listener in listeners:
            self._pipes.append(listener.accept())
            listener.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Call `function(*args)` on all ranks. The first rank's exception is raised here, with its traceback as a note."""
        if self._process is None:
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
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._pipes = None, []
        if self._directory is not None:
            self._directory.cleanup()


@pytest.fixture(scope="session", autouse=True)
def captures() -> None:
    keep_captures()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small ops on busy machines: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[GlooRanks]:
    ranks = GlooRanks()
    yield ranks
    ranks.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group for all users of the ranks, who come first, and one for each file, whose tests share fixtures and caches.

    xdist (--dist loadgroup) runs a group in one process. Before xdist reads the marks.
    """
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        group = _GLOO if _is_on_ranks(item) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not _is_on_ranks(item))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the ranks when no test for them follows: idle ones poll for every group of ranks they ever made."""
    if _is_on_ranks(item) and (nextitem is None or not _is_on_ranks(nextitem)):
        ranks: GlooRanks | None = getattr(item, "funcargs", {}).get(_FIXTURE)
        if ranks is not None:  # None: the test was skipped
            ranks.stop()


def _is_on_ranks(item: pytest.Item) -> bool:
    return _FIXTURE in getattr(item, "fixturenames", ())
