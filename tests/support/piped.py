"""Small models compiled for virtual ranks with pipeline stages and microbatches."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import autopar
from autopar.ir.mesh import virtual_mesh
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.residual import Residual, batch


def piped(pp: int = 2, dp: int = 2, tp: int = 1, num_microbatches: int = 2, **options: Any) -> ParallelModule:
    """`Residual` on pp × dp × tp, on A100s; `model` are its arguments."""
    torch.manual_seed(0)
    model = Residual(**options.pop("model", {})).double()
    options = {"backend": "eager", "cluster": "8xa100", "num_microbatches": num_microbatches} | options
    return autopar.compile(model, virtual_mesh(pp=pp, dp=dp, tp=tp), example_inputs=batch(), **options)


@cache
def plain_pipe() -> ParallelModule:
    """Two stages, two microbatches."""
    return piped()


@cache
def tied_pipe() -> ParallelModule:
    """The first and the last stage share a table."""
    return piped(model={"is_tied": True})


@cache
def interleaved_pipe() -> ParallelModule:
    """Four stages on two ranks."""
    return piped(schedule="interleaved", model={"num_blocks": 4})
