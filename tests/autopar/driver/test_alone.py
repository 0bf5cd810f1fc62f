"""Threads compile one after another: torch sets for all of them what one needs to trace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import autopar
from autopar._torch import FakeTensorMode


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu()).square().mean()


def is_right(width: int) -> bool:
    x = torch.randn(4, 8)
    parallel = autopar.compile(Model(width), autopar.virtual_mesh(dp=2), example_inputs={"x": x}, backend="eager")
    parallel(x).backward()
    return bool(parallel.verify(x))


def test_threads_compile_train_and_verify_beside_each_other() -> None:
    dispatch, dtype = FakeTensorMode.dispatch, torch.get_default_dtype()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, (16, 32, 48, 64)))
    assert FakeTensorMode.dispatch is dispatch and torch.get_default_dtype() is dtype
