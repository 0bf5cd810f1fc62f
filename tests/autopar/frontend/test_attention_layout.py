"""What attention gives lies otherwise in an export than in a program, and copies of it are copies all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection, self.gate = nn.Linear(32, 96), nn.Parameter(torch.linspace(0.5, 1.5, 4).view(4, 1, 1))


class TimeFirst(Heads):
    """Gated by head before heads are merged, from inputs whose length comes first."""

    def forward(self, x: Tensor) -> Tensor:
        length, batch, _ = x.transpose(0, 1).shape
        parts = self.projection(x.transpose(0, 1)).chunk(3, -1)
        query, key, value = (each.reshape(length, batch * 4, 8).transpose(0, 1).view(batch, 4, length, 8) for each in parts)
        attended = F.dropout(F.scaled_dot_product_attention(query, key, value) * self.gate, 0.0)
        return attended.permute(2, 0, 1, 3).contiguous().view(length * batch, 32).square().mean()


class Overwritten(Heads):
    """Writes into a copy, and reads what it is a copy of."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (4, 8)).transpose(1, 2).contiguous() for each in self.projection(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value) * self.gate
        copy = attended.transpose(1, 2).contiguous()
        copy.mul_(3)
        return attended.square().mean() + copy.mean()


class Flattened(Heads):
    """A view of what lies head by head, as the query does."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (4, 8)).transpose(1, 2).contiguous() for each in self.projection(x).chunk(3, -1))
        return F.relu(F.scaled_dot_product_attention(query, key, value) * self.gate).view(-1, 8).square().mean()


@pytest.mark.parametrize("kind", [TimeFirst, Overwritten, Flattened])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}], ids=str)
def test_copies_of_attention_are_copies(kind: type[nn.Module], axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 32)}
    parallel = autopar.compile(kind(), autopar.virtual_mesh(**axes), example_inputs=batch, backend="eager")
    report = parallel.verify(**batch, promote=True)
    assert report, report
