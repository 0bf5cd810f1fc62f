"""Every Triton kernel, compiled for GPUs that need not be here. Interpreting is decided at import, so not in a process that interprets.

make test-kernels                                  or
.venv/bin/python -m pytest tests/kernels/compiled
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def why_not() -> str:
    if find_spec("triton") is None:
        return "Triton is not installed"
    # A process that interprets kernels cannot compile them: Triton decides at import.
    wanted = os.environ.get("COMPILE_KERNELS") == "1" and os.environ.get("TRITON_INTERPRET") != "1"
    return "" if wanted else "needs a process with COMPILE_KERNELS=1: make test-kernels"


class Skipped(pytest.Module):
    """A file that is not imported, for it would import Triton."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(why_not(), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if HERE in module_path.parents and why_not():
        return Skipped.from_parent(parent, path=module_path)
    return None
