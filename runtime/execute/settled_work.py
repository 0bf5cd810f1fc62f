"""Collectives that are over, for a measurement of memory, when their tensors are let go of, and not when their results have arrived."""

from __future__ import annotations

import operator
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Protocol

import torch

from autopar.runtime._torch import num_holders, num_references

# A thread that lets go of its tensors may have to wait for a core, on a machine that is busy for a long while.
_PATIENCE_SECONDS = 5.0
# The tensor may be let go of, and the Python object not yet: without this wait ten of 1,500 all-reduces were counted for ever.
_MOMENT_SECONDS = 1e-3


class Work(Protocol):
    """What a collective or a transfer that was launched is waited for by."""

    def wait(self) -> object: ...


class SettledWork:
    """What `start` launches, whose `wait` returns when it holds neither `source`, which it reads, nor `arriving`, which it writes.

    Threads of gloo's let go of tensors some microseconds after it is known that all is done, and what goes in a thread of theirs, torch's
    profiler does not see: it would count it for ever.
    """

    def __init__(self, start: Callable[[], Work], arriving: torch.Tensor, source: torch.Tensor) -> None:
        self._arriving, self._source = arriving, source
        self._before = self._num_references()
        self._work: Work | None = start()

    def wait(self) -> None:
        """May be called once."""
        work, self._work = self._work, None
        assert work is not None
        work.wait()
        del work
        begin = perf_counter()
        while any(map(operator.gt, self._num_references(), self._before)) and perf_counter() - begin < _PATIENCE_SECONDS:
            sleep(0)
        sleep(_MOMENT_SECONDS)

    def _num_references(self) -> tuple[int, ...]:
        # Who has a view holds the memory, too. Of what is reduced in place we may make views ourselves meanwhile.
        views = () if self._arriving is self._source else (num_holders(self._arriving),)
        return num_references(self._arriving), num_references(self._source), *views
