"""Padding on the left, masked by numbers that are added: rows of padding attend to nothing but low numbers, and count in the loss."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import autopar

WIDTH, LENGTH, BATCH = 32, 8, 4
LOWEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Causal, and without the keys that are not kept, in the spelling of `form`."""

    def __init__(self, form: str, lowest: float, num_heads: int) -> None:
        super().__init__()
        self.form, self.lowest, self.num_heads = form, lowest, num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("beyond", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        query, key, value = (each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        out = self.attend(query, key, value, ~keep[:, None, None, :])
        return F.mse_loss(self.output(out.transpose(1, 2).flatten(2)), target)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        mask = torch.zeros(padding.shape[0], 1, LENGTH, LENGTH, dtype=query.dtype).masked_fill(self.beyond | padding, self.lowest)
        if self.form == "torch's":
            return F.scaled_dot_product_attention(query, key, value, mask)
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if self.form == "filled":
            return scores.masked_fill(self.beyond | padding, self.lowest).softmax(-1) @ value
        if self.form == "added twice":
            mask = self.beyond.to(query.dtype) * self.lowest + padding.to(query.dtype) * self.lowest
        return (scores + mask).softmax(-1) @ value


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keep = torch.arange(LENGTH) >= torch.tensor([0, 1, 3, 5])[:, None]
    return torch.randn(BATCH, LENGTH, WIDTH), keep, torch.randn(BATCH, LENGTH, WIDTH)


FORMS = [("torch's", -1e9), ("torch's", LOWEST), ("added", LOWEST), ("added twice", -1e9), ("added twice", LOWEST), ("filled", -1e9)]


@pytest.mark.parametrize(("form", "lowest", "num_heads"), [*((*form, 4) for form in FORMS), ("added", -1e9, 1)])
def test_rows_of_padding_are_exact(form: str, lowest: float, num_heads: int) -> None:
    """In float32 and float64; with one head the rows are split."""
    args = inputs()
    torch.manual_seed(1)
    model = Attention(form, lowest, num_heads)
    exact = copy.deepcopy(model).double()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), backend="eager")
    parallel(*args).backward()
    if lowest == LOWEST:
        # In both precisions the scores of a masked row are lost in that number, and its keys weigh alike.
        with sdpa_kernel(SDPBackend.MATH):
            exact(args[0].double(), args[1], args[2].double()).backward()
        grads = dict(parallel.named_parameters())
        for name, parameter in exact.named_parameters():
            assert parameter.grad is not None and grads[name].grad is not None
            torch.testing.assert_close(grads[name].grad.double(), parameter.grad, atol=1e-6, rtol=1e-4)
    assert parallel.verify(*args) and parallel.verify(*args, promote=True)
    assert parallel.summary()["flops_split"] == 1.0
