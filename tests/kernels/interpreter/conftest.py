"""Every Triton kernel, run on the CPU by Triton's interpreter. It decides at import, so these tests need a process of their own.

make test-kernels                                                     or
TRITON_INTERPRET=1 .venv/bin/python -m pytest tests/kernels/interpreter
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

HERE = Path(__file__).parent


def why_not() -> str:
    if find_spec("triton") is None:
        return "Triton is not installed"
    return "" if os.environ.get("TRITON_INTERPRET") == "1" else "needs a process with TRITON_INTERPRET=1: make test-kernels"


class Skipped(pytest.Module):
    """A file that is not imported, for it would import Triton."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(why_not(), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if HERE in module_path.parents and why_not():
        return Skipped.from_parent(parent, path=module_path)
    return None


def float_to_bfloat16(bits: numpy.ndarray) -> numpy.ndarray:
    """To the nearest, ties to even, as GPUs round; NaN stays NaN."""
    value = torch.from_numpy(numpy.ascontiguousarray(bits).view(numpy.float32).reshape(-1).copy())
    return value.bfloat16().view(torch.int16).numpy().view(numpy.uint16)


@pytest.fixture(autouse=True, scope="session")
def bfloat16_as_on_a_gpu() -> None:
    """The interpreter holds bfloat16 as 16-bit integers: it truncates instead of rounding, and multiplies the integers in `dot`."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_float(data: numpy.ndarray, source: Any, target: Any, rounding: Any) -> numpy.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return float_to_bfloat16(data).reshape(data.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
        return convert(data, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
        return dot(self, a, b, *rest)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small: threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)
