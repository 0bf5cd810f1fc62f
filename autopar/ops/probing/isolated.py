"""Runs a function in a forked child, so that a crash or an endless loop of a kernel ends the child and nothing else."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def isolated(function: Callable[[], T], seconds: float) -> T | None:
    """`function()` in a child process; None where it raises, crashes or takes longer than `seconds`, and where nothing can be forked.

    The result is pickled. The child computes on one thread: the threads of the parent do not live on in it.
    """
    if not hasattr(os, "fork"):
        return None
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forking beside threads: the child takes no lock of theirs
        child = os.fork()
    if child == 0:
        os.close(reading)
        _work(function, writing)
    os.close(writing)
    try:
        content = _read(reading, seconds)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return pickle.loads(content) if content else None


def _work(function: Callable[[], object], writing: int) -> None:
    """The child: writes the pickled result and ends without clean-up, which is the parent's."""
    try:
        faulthandler.disable()  # a crash is an answer here, nothing to report
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silence, stream)
        torch.set_num_threads(1)
        content = pickle.dumps(function())
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(content)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _read(reading: int, seconds: float) -> bytes:
    """All that is written until the other end is closed; nothing when that takes too long."""
    found = b""
    # Not `select`, which takes no descriptor above 1,023: a rank may have many connections.
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while poll.poll(seconds * 1000):
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            return found
        found += chunk
    return b""
