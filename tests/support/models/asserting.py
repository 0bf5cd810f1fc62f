"""Models with an `assert` in forward; pytest rewrites those that stand in test files to something else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.models.layer import Layer


def careful(layer: Layer, x: Tensor) -> Tensor:
    assert (x.abs() < 100).all(), "x is too large"
    y = layer.linear(x)
    assert y.mean() < 1e6
    return y.square().mean()


def negated(layer: Layer, x: Tensor) -> Tensor:
    assert not x.isnan().any(), "x is not a number"
    return layer.linear(x).sum()


def telling(layer: Layer, x: Tensor) -> Tensor:
    assert x.isfinite().all(), f"x is {x}"
    return layer.linear(x).sum()


class Careful(nn.Module):
    """Asserts something of its inputs, of what two layers make of them, and of a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        assert x.isfinite().all(), "x is not finite"
        hidden = torch.tanh(self.up(x))
        assert (hidden.abs() <= 1).all()
        return -torch.distributions.Normal(self.down(hidden), scale).log_prob(x).mean()
