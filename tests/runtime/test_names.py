from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.module import ParallelModule


class Model(nn.Module):
    kind = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale, self.config = nn.Linear(4, 4), 1.0, {"factor": 1.0}
        self.register_buffer("count", torch.zeros(()))

    @property
    def width(self) -> int:
        return self.fc.in_features

    def own_method(self, factor: float) -> float:
        self.scale = self.scale * factor
        return self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) * self.scale * self.config["factor"]).square().mean()


def compiled() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model()
    return autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), backend="eager"), model


def test_names_of_the_model_are_read_there() -> None:
    parallel, model = compiled()
    assert parallel.config is model.config and parallel.fc is model.fc and parallel.count is model.count
    assert parallel.scale == 1.0 and parallel.kind == "mine" and parallel.width == 4
    assert parallel.own_method(3.0) == model.scale == 3.0
    assert {"own_method", "config", "fc", "explain"} <= set(dir(parallel))
    assert not hasattr(parallel, "nothing")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        _ = parallel.nothing


def test_what_is_set_is_the_models_and_the_next_call_has_it() -> None:
    parallel, model = compiled()
    x = torch.randn(4, 4)
    before = parallel(x).item()
    parallel.scale = 2.0
    assert model.scale == 2.0 and "scale" not in vars(parallel)
    torch.testing.assert_close(parallel(x).item(), 4 * before)
    parallel.own_method(0.5)
    parallel.config["factor"] = 3.0
    torch.testing.assert_close(parallel(x).item(), 9 * before)
    parallel.act, parallel.note = nn.Tanh(), "new"
    assert model.act is parallel.act and dict(model.named_children()).keys() == {"fc", "act"}
    del parallel.act, parallel.note
    assert not hasattr(model, "act") and not hasattr(model, "note")


def test_names_of_ours_stay_ours() -> None:
    parallel, model = compiled()
    parallel.step, parallel.seed = 5, 7
    assert (parallel.step, parallel.seed) == (5, 7) and not hasattr(model, "step")
    handle = parallel.register_forward_hook(lambda module, args, output: output * 2)
    assert not model._forward_hooks
    handle.remove()
    parallel.training = False
    assert model.training is False and model.fc.training is True


def test_a_name_of_both_is_ours_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Clashing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seed = 3

        def summary(self) -> str:
            return "the model's"

    model = Clashing()
    parallel: ParallelModule = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), backend="eager")
    assert "names that the parallel module has, too: seed, summary; parallel.seed is autopar's" in caplog.text
    parallel.seed = 9
    assert model.seed == 3 and model.summary() == "the model's"
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="autopar"):
        compiled()
    assert not caplog.records
