"""What the C library does with memory that a step on a CPU frees: torch has no allocator of its own there.

By default glibc gives the end of its heap, and each larger block, back to the system, and the next step takes the same pages again, one
fault for every 4 KiB, zeroed: up to a sixth of a step (docs/benchmarks.md). Here it keeps them.
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


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what it frees for what it takes next; what a compile has left goes back first. Once a process.

    Whether that was done: not where the environment sets one of glibc's thresholds, nor where another C library is in use.
    """
    if any(name in os.environ for name in _BY_ENVIRONMENT) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        return False
    library.malloc_trim(0)
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
