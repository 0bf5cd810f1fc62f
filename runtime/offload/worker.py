"""A thread that does what it is given, in order, and that a fork does not break.

Threads do not survive a fork: whoever waited in the child for what the parent's thread has in hand would wait for ever. So each process
has a thread of its own, and what was under way when it forked off is refused there by name.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from autopar.errors import OffloadError


class Forked(Protocol):
    """What starts anew in a process that forked off."""

    def forked(self) -> None: ...


_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()


def at_fork(each: Forked) -> None:
    """Call `each.forked()` in every process that forks off while it is there: it has one thread then, and locks are as they were."""
    _LIVE.add(each)


def _in_child() -> None:
    for each in list(_LIVE):
        each.forked()


os.register_at_fork(after_in_child=_in_child)


class Work:
    """What a worker was given. `result` waits for it and raises what it raised, once; in a process that forked off meanwhile, where
    nobody does it, `OffloadError`."""

    def __init__(self, future: Future[Any], what: str) -> None:
        self._future: Future[Any] | None = future
        self._process, self._what = os.getpid(), what

    def result(self) -> None:
        if self._process != os.getpid():
            raise OffloadError(of_another_process(self._what, self._process))
        # An error knows all that was held where it passed: nobody of these may know the error, or all stays until a collection.
        future, self._future = self._future, None
        try:
            if future is not None:
                future.result()
        finally:
            del future


def of_another_process(what: str, process: int) -> str:
    return (
        f"{what} is of process {process}, from which this one ({os.getpid()}) forked off in the middle of a step: nobody copies it here. "
        "Fork before the forward or after the step, or call the module again in this process"
    )


class Worker:
    """One thread, made when it is first needed; a process that forks off makes its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadPoolExecutor | None = None
        at_fork(self)

    def submit(self, what: str, function: Callable[..., Any], *args: Any) -> Work:
        """Call `function(*args)` behind all that was submitted before; `what` is what errors call it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, self._name)
        return Work(self._thread.submit(function, *args), what)

    def forked(self) -> None:
        self._thread = None
