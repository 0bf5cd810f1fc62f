"""Writes through `.data` in forward, as operators write them: `x.data *= y`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from tests.support.captures import compiled

X = torch.randn(4, 8, dtype=torch.float64)


class Counted(nn.Module):
    """Buffers that each call writes, a part of one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("number", torch.zeros(()))
        self.register_buffer("mean", torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.number.data += 1
        self.mean.data *= 0.9
        self.mean.data[:4] += 0.1 * x.detach().mean()
        return (self.layer(x) ** 2 * self.mean).mean() * (1 + self.number)


def test_buffers_are_written() -> None:
    torch.manual_seed(0)
    model = Counted()
    parallel = compiled(copy.deepcopy(model), {"dp": 2}, (X,))
    for _ in range(2):
        torch.testing.assert_close(parallel(X), model(X), rtol=1e-9, atol=1e-12)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(parallel.get_buffer(name), buffer, rtol=1e-9, atol=1e-12)
    assert parallel.verify(X)


class Masked(nn.Module):
    """A masked convolution, as PixelCNNs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.float64).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data *= self.mask
        return self.layer(x).square().mean()


def test_a_parameter_is_refused_as_written_by_any_other_name() -> None:
    with pytest.raises(CaptureError, match="writes into parameter 'layer.weight'"):
        compiled(Masked(), {"dp": 2}, (X,))


class Swapped(nn.Module):
    """Another tensor's data, of the same shape: not the buffer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("mean", torch.ones(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = self.mean.data.t()
        return (self.layer(x) @ self.mean).square().mean()


def test_another_view_of_its_own_data_is_refused() -> None:
    with pytest.raises(CaptureError, match="gives a tensor other data"):
        compiled(Swapped(), {"dp": 2}, (X,))
