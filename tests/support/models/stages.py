"""Models that stages of a pipeline share out: two layers, and three of which the last has the weight of the first. Losses are scalars."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x).relu()) ** 2).mean()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh()).square().mean()
