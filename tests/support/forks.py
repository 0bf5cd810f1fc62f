"""A function in a process that forks off."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable


def in_a_fork(function: Callable[[], str], seconds: float = 30.0) -> str:
    """What `function` gives there. Raises `AssertionError` with its traceback where it raises, and after `seconds`."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = f"ok {function()}"
        except BaseException:
            found = traceback.format_exc()
        os.write(writing, found.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], seconds)
    if not ready:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    assert found.startswith("ok "), found or f"it hangs: nothing came for {seconds} s"
    return found.removeprefix("ok ")
