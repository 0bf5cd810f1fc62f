"""Runs a model with `torch.compiler.is_compiling()` true, as in a trace, if it fails without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from autopar._torch import compiling

T = TypeVar("T")


def as_traced(run: Callable[[], T]) -> T:
    """What `run` yields; where it fails, what it yields once it is told that it is being compiled, as the trace tells it.

    Models ask `torch.compiler.is_compiling()` to leave out what cannot be traced: kernels for some dtypes, for example.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # reports each failure, whoever handles it
    was_disabled, log.disabled = log.disabled, True
    try:
        return run()
    except Exception as error:
        try:
            with compiling():
                return run()
        except Exception:
            raise error from None
    finally:
        log.disabled = was_disabled
