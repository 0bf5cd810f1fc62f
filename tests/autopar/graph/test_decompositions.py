"""What ops of torch are made of, where that decides how they are split."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.captures import compiled


class Halves(nn.Module):
    """Writes into memory whose shape alone it takes from a value, as transformers' DeepSeek does with keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.layer(x)
        both = h.new_empty(*h.shape[:-1], 16)
        both[..., :8] = h
        both[..., 8:] = h.sin()
        return F.cross_entropy(both, labels)


def test_a_value_that_gives_shape_and_dtype_alone_is_not_gathered() -> None:
    x, labels = torch.randn(8, 8), torch.randint(0, 16, (8,))
    parallel = compiled(Halves(), {"dp": 2}, (x, labels), num_microbatches=2)
    assert parallel.verify(x, labels)
    assert "all_gather" not in parallel.print_program(rank=0)
