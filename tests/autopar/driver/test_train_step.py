"""Options of a training step that make no sense are refused, each with both values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar import MixedPrecision
from autopar.errors import AutoparError


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0 leaves no gradient"),
        ({"accumulate": 0}, "accumulate=0 calls make no step"),
        ({"non_finite": "ignore"}, "non_finite='ignore' is unknown"),
        ({"ema": 1.0}, "ema=1.0 is no decay"),
        ({"update_scope": "tensor"}, "update_scope='tensor' is unknown"),
    ],
)
def test_values_that_an_option_does_not_have(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(AutoparError, match=problem):
        autopar.TrainStep(**options)


@pytest.mark.parametrize("options", [{"initial": 0.0}, {"growth_factor": 0.5}, {"backoff_factor": 2.0}, {"growth_interval": 0}])
def test_scales_that_could_not_be_found(options: dict[str, Any]) -> None:
    with pytest.raises(AutoparError, match="use initial > 0"):
        autopar.LossScale(**options)


def test_gradients_in_float16_are_scaled_unless_told_how() -> None:
    half, mine = MixedPrecision.of("fp16"), autopar.LossScale(initial=8.0)
    assert autopar.TrainStep().scaled_for(half).loss_scale == autopar.LossScale()
    assert autopar.TrainStep().scaled_for(MixedPrecision(reduce=torch.float16)).loss_scale == autopar.LossScale()
    assert autopar.TrainStep(loss_scale=mine).scaled_for(half).loss_scale == mine
    for precision in (None, MixedPrecision()):
        assert autopar.TrainStep().scaled_for(precision).loss_scale is None


def test_what_ranks_must_agree_on_first() -> None:
    assert not autopar.TrainStep(accumulate=4, ema=0.9).agrees_first
    for options in ({"clip_grad_norm": 1.0}, {"non_finite": "skip"}, {"loss_scale": autopar.LossScale()}):
        assert autopar.TrainStep(**options).agrees_first
