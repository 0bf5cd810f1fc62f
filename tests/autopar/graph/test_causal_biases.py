"""Models that use the causal biases of torch.nn.attention.bias."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import bias as torch_bias
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import autopar
from autopar.errors import CaptureError
from autopar.foresight.capture_work import on_meta


class Attention(nn.Module):
    """Four queries attend to six keys, of which the last four are theirs."""

    def __init__(self, make: Callable[..., Any], holds: bool) -> None:
        super().__init__()
        self.qkv, self.make = nn.Linear(16, 48), make
        self.bias = make(4, 6) if holds else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        bias = self.make(4, 6) if self.bias is None else self.bias
        return F.scaled_dot_product_attention(q[:, :, 2:], k, v, attn_mask=bias).square().mean()


@pytest.mark.parametrize(
    ("make", "holds", "backend"),
    [
        (causal_lower_right, False, "eager"),
        (causal_lower_right, True, "inductor"),
        (causal_upper_left, False, "eager"),
        (causal_upper_left, True, "eager"),
    ],
)
def test_biases_are_masks(make: Callable[..., Any], holds: bool, backend: str) -> None:
    model, x = Attention(make, holds), torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=(x,), backend=backend)
    assert parallel.verify(x)
    assert any("tp" in str(each) for each in parallel.plan.parameters.values()), "heads are to be split"
    assert isinstance(model.bias, torch_bias.CausalBias) == holds, "the model is as it was"


def test_a_model_that_holds_one_has_a_copy_on_meta() -> None:
    model = Attention(causal_lower_right, True)
    assert on_meta(model).bias is model.bias


def test_one_that_is_no_attribute_is_refused() -> None:
    class Listed(Attention):
        def __init__(self) -> None:
            super().__init__(lambda *_: self.biases[0], holds=False)
            self.biases = [causal_upper_left(4, 6)]

    with pytest.raises(CaptureError, match="forward reads a CausalBias of torch.nn.attention.bias"):
        autopar.compile(Listed(), autopar.virtual_mesh(dp=2), example_inputs=(torch.randn(4, 6, 16),), backend="eager")


def test_code_that_knows_the_class_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CausalBias", torch_bias.CausalBias, raising=False)
    x = torch.randn(2, 6, 16)  # no call that another test has compiled
    with pytest.raises(CaptureError):
        autopar.compile(Attention(causal_upper_left, False), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
