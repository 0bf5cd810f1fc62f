"""A model that will not run as it is may run as the trace sees it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontend.traced import as_traced


class Plain(nn.Module):
    """Eagerly it wants a kernel that is not there for every dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and self.linear.weight.dtype == torch.float64:
            raise RuntimeError("no kernel for float64")
        return self.linear(x).sum()


def test_what_runs_is_run_as_it_is() -> None:
    assert as_traced(torch.compiler.is_compiling) is False


def test_what_does_not_run_is_told_that_it_is_compiled() -> None:
    model = Plain().double()
    assert as_traced(lambda: model(torch.ones(2, 4).double())).shape == ()
    assert not torch.compiler.is_compiling()


def test_the_first_error_is_the_one_that_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("compiled" if torch.compiler.is_compiling() else "eager")

    with pytest.raises(RuntimeError, match="eager"):
        as_traced(fail)
    assert not torch.compiler.is_compiling()


def test_such_a_model_is_captured_and_verified_in_float64() -> None:
    x = torch.randn(8, 4).double()
    parallel = autopar.compile(Plain().double(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    assert parallel.verify(x, promote=True)
