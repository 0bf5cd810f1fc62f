"""Buffers that forward makes: one that the model does not have yet is refused, one of another length is made in the program."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Positions(nn.Module):
    """Makes its table in the first call, and a longer one when it is needed, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.length = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.register_buffer("table", torch.arange(self.length)[:, None] / torch.arange(1, 9), persistent=False)
        return self.linear(x + self.get_buffer("table")[: x.shape[1]]).square().mean()


class Mean(nn.Module):
    """Keeps the mean of the first batch, which a program would take of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(0)
        return self.linear(x - self.mean).square().mean()


@pytest.mark.parametrize(("model", "name"), [(Positions(), "table"), (Mean(), "mean")], ids=["table", "mean"])
def test_a_buffer_that_forward_makes_is_refused_until_the_model_has_it(model: nn.Module, name: str) -> None:
    mesh, batches = autopar.virtual_mesh(dp=2), torch.randn(2, 4, 6, 8)
    with pytest.raises(CaptureError, match=rf"makes buffers that the model does not have yet \('{name}'\).* call the model once before"):
        autopar.compile(model, mesh, example_inputs=(batches[0],), backend="eager")
    assert not list(model.buffers())
    model(batches[0])
    parallel = autopar.compile(copy.deepcopy(model), mesh, example_inputs=(batches[0],), backend="eager")
    for x in batches:
        torch.testing.assert_close(parallel(x), model(x))


def test_a_longer_table_in_place_of_one_that_is_there_is_made_in_the_program() -> None:
    model = Positions()
    model(torch.randn(4, 3, 8))
    parallel = autopar.compile(copy.deepcopy(model), autopar.virtual_mesh(dp=2), example_inputs=(torch.randn(4, 3, 8),), backend="eager")
    for length in (6, 2, 6):
        x = torch.randn(4, length, 8)
        torch.testing.assert_close(parallel(x), model(x))
