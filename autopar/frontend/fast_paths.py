"""Kernels of torch's that are a whole module, as `nn.TransformerEncoderLayer` takes one in evaluation: no rank could split one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch.backends import mha


@contextmanager
def fast_paths_off() -> Generator[None]:
    """While this is entered, these modules are the ops that they are made of, as in training."""
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)
