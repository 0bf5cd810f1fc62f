"""Runs a model with `torch.compiler.is_compiling()` true, as in a trace, if it fails without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autopar._torch import compiling, fake_errors_quiet

T = TypeVar("T")


def as_traced(run: Callable[[], T]) -> T:
    """What `run` yields; where it fails, what it yields once it is told that it is being compiled, as the trace tells it.

    Models ask `torch.compiler.is_compiling()` to leave out what cannot be traced: kernels for some dtypes, for example.
    """
    with fake_errors_quiet():
        try:
            return run()
        except Exception as error:
            try:
                with compiling():
                    return run()
            except Exception:
                raise error from None
