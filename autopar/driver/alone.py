"""One thread at a time where torch traces: what it sets meanwhile, all threads of the process would see."""

from __future__ import annotations

import threading

# Entered to compile and to verify; a thread that has it may enter it again.
TRACING = threading.RLock()
