"""What the C library does with memory that a step on a CPU frees: torch has no allocator of its own there.

By default glibc gives the end of its heap, and each larger block, back to the system, and the next step takes the same pages again, one
fault for every 4 KiB, zeroed: up to a sixth of a step (docs/benchmarks.md). Here it keeps them, from the time when steps are alike.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

# From glibc's <malloc.h>: how much may lie free at the end of the heap, and how large a block has to be to lie outside it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The most that glibc takes for each.
_TRIM_BYTES, _MMAP_BYTES = 2**31 - 1, 32 << 20
_BY_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


# The calls behind a compile that begin with nothing kept. In the first two steps parameters are laid out and the optimizer makes its state,
# among activations that go again: into the holes that these leave nothing fits that comes later.
_SETTLING_CALLS = 4


class FreedMemory:
    """What the calls of a module free: from the fifth behind a compile on the next ones find it there."""

    def __init__(self) -> None:
        self._settling = 0

    def keep(self) -> None:
        """Begin to, behind a compile."""
        if keep_freed_memory():
            self._settling = _SETTLING_CALLS

    def begin_call(self) -> None:
        if self._settling:
            self._settling -= 1
            ctypes.CDLL(None).malloc_trim(0)


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what it frees for what it takes next. Once a process.

    Whether that was done: not where the environment sets one of glibc's thresholds, nor where another C library is in use.
    """
    if any(name in os.environ for name in _BY_ENVIRONMENT) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        return False
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
