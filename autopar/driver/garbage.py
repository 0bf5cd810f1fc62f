"""Pauses Python's cyclic garbage collector during a compile, which makes a million objects and hardly any dead reference cycle."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Generator[None]:
    """No collections while this is entered. Tracing 80 layers takes a fifth less; what would have been collected takes 0.4 GB."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
