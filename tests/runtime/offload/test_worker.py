"""A thread that a fork does not break."""

from __future__ import annotations

import threading

import pytest

from autopar.errors import OffloadError
from autopar.runtime.offload.worker import Worker
from tests.support.forks import in_a_fork


def test_in_order_and_errors_come_with_the_result() -> None:
    worker, found = Worker("test"), list[int]()
    works = [worker.submit("it", found.append, number) for number in range(5)]
    works[-1].result()
    assert found == list(range(5))
    with pytest.raises(ZeroDivisionError):
        worker.submit("it", lambda: 1 / 0).result()


def test_a_fork_in_the_middle_has_a_thread_of_its_own() -> None:
    worker, going = Worker("test"), threading.Event()
    under_way = worker.submit("buffer h of rank 0", going.wait)

    def in_the_child() -> str:
        with pytest.raises(OffloadError, match="buffer h of rank 0 is of process .*Fork before the forward or after the step"):
            under_way.result()
        found: list[str] = []
        worker.submit("it", found.append, "done").result()
        return found[0]

    assert in_a_fork(in_the_child) == "done"
    going.set()
    under_way.result()
