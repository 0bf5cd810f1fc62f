"""What ops of torch are made of, where that decides how they are split."""

from __future__ import annotations

import pytest
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


class Clicks(nn.Module):
    """Binary cross entropy of probabilities, some of them exactly 0 or 1."""

    def __init__(self, reduction: str, weighted: bool) -> None:
        super().__init__()
        self.first, self.last, self.reduction, self.weighted = nn.Linear(8, 16), nn.Linear(16, 1), reduction, weighted

    def forward(self, x: Tensor, clicked: Tensor) -> Tensor:
        free = self.last(self.first(x).relu()).squeeze(1)
        probability = torch.where(x[:, 0] > 1, free - free.detach() + (x[:, 1] > 0), free.sigmoid())
        loss = F.binary_cross_entropy(probability, clicked, clicked + 1 if self.weighted else None, reduction=self.reduction)
        return loss.square().mean() if self.reduction == "none" else loss


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_binary_cross_entropy_is_split_over_samples(reduction: str, weighted: bool) -> None:
    torch.manual_seed(0)
    model, x, clicked = Clicks(reduction, weighted), torch.randn(8, 8), torch.arange(8).remainder(2).float()
    x[:3, 0], x[:3, 1] = 2.0, torch.tensor([1.0, -1.0, 1.0])
    split = compiled(model, {"dp": 4}, (x, clicked))
    for parallel in (split, compiled(model, {"pp": 2}, (x, clicked), num_microbatches=2)):
        assert parallel.verify(x, clicked, promote=True).worst <= 1e-9
    assert split.summary()["flops_split"] == 1.0
