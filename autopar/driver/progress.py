"""What is being done, on a terminal, where it takes longer than two seconds: one line, gone when it is done.

    with progress("compiling") as show:
        show("choose shardings")        →   autopar  compiling: choose shardings  7 s

Nothing is shown where standard error is no terminal, nor on other processes than rank 0; the log has every pass with its time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

QUIET_SECONDS = 2.0
_REFRESH_SECONDS = 0.5
_CLEAR = "\r\x1b[2K"


class Display:
    """One line on a terminal, from `QUIET_SECONDS` after its start until it is closed. What is begun meanwhile goes behind it."""

    def __init__(self, stream: TextIO, started: float) -> None:
        self.texts: list[str] = []
        self._stream, self._started = stream, started
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._refresh, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _refresh(self) -> None:
        wait = max(QUIET_SECONDS - (time.perf_counter() - self._started), 0.0)
        if self._is_over.wait(wait):
            return
        while True:
            self._write(f"{_CLEAR}autopar  {': '.join(self.texts)}  {time.perf_counter() - self._started:.0f} s")
            if self._is_over.wait(_REFRESH_SECONDS):
                return self._write(_CLEAR)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


_current: list[Display] = []


@contextmanager
def progress(text: str, started: float | None = None) -> Generator[Callable[[str], None]]:
    """While the block runs `text` is shown, and behind it what the function that it gets is called with.

    Time counts from `started` (`time.perf_counter()`), where the block is one of several.
    """
    if not _current and not _is_shown():
        yield lambda step: None
        return
    is_first = not _current
    if is_first:
        _current.append(Display(sys.stderr, time.perf_counter() if started is None else started))
    texts = _current[0].texts
    place = len(texts)
    texts.append(text)

    def show(step: str) -> None:
        texts[place:] = [f"{text}: {step}"]

    try:
        yield show
    finally:
        del texts[place:]
        if is_first:
            _current.pop().close()


def _is_shown() -> bool:
    is_first = os.environ.get("RANK", "0") == "0" and threading.current_thread() is threading.main_thread()
    return is_first and sys.stderr is not None and sys.stderr.isatty()
