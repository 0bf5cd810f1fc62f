"""What a step leaves that fails, or that something is called in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.errors import AutoparError
from autopar.runtime.train.updates import Updates
from tests.support.models.trained import TwoLayers

SGD = (torch.optim.SGD, {"lr": 0.1})


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def parallel_of(**options: Any) -> autopar.ParallelModule:
    torch.manual_seed(0)
    return autopar.compile(TwoLayers(), autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager", **({"optimizer": SGD} | options))


def weights_after(number: int, **options: Any) -> dict[str, Tensor]:
    parallel = parallel_of(**options)
    for _ in range(number):
        parallel.train_step(X)
    return parallel.full_state_dict()


def once(monkeypatch: pytest.MonkeyPatch, parallel: autopar.ParallelModule, at: int = 1) -> None:
    """Let call `at` of the optimizer's step fail."""
    calls: list[int] = []
    optimizer = parallel.optimizer
    assert optimizer is not None
    step = optimizer.step

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("no memory")
        return step(*args)

    monkeypatch.setattr(optimizer, "step", failing)


@pytest.mark.parametrize(
    "train_step", [autopar.TrainStep(clip_grad_norm=1e9), autopar.TrainStep(accumulate=2)], ids=["clipped", "accumulated"]
)
def test_the_step_after_one_that_failed_begins_anew(monkeypatch: pytest.MonkeyPatch, train_step: autopar.TrainStep) -> None:
    parallel = parallel_of(train_step=train_step)
    once(monkeypatch, parallel)
    with pytest.raises(torch.OutOfMemoryError):
        for _ in range(train_step.accumulate):
            parallel.train_step(X)
    assert all(each.grad is None for each in parallel.parameters())
    for _ in range(train_step.accumulate):
        parallel.train_step(X)
    expected = weights_after(train_step.accumulate, train_step=train_step)
    for name, value in parallel.full_state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_step_that_fails_midway_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = parallel_of()
    once(monkeypatch, parallel, at=2)
    with pytest.raises(torch.OutOfMemoryError) as error:
        parallel.train_step(X)
    assert any(" of 4 parameters were updated before that" in note for note in error.value.__notes__)


def test_a_checkpoint_takes_the_place_of_what_was_accumulated(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_step": autopar.TrainStep(accumulate=2)}
    parallel = parallel_of(**options)
    autopar.save(tmp_path, parallel)
    parallel.train_step(X * float("nan"))
    autopar.load(tmp_path, parallel)
    for _ in range(2):
        parallel.train_step(X)
    expected = weights_after(2, **options)
    assert all(torch.equal(value, expected[name]) for name, value in parallel.full_state_dict().items())


def test_what_a_hook_evaluates_is_not_trained_on() -> None:
    parallel, losses = parallel_of(), list[Tensor]()

    def evaluate(*_: Any) -> None:
        with torch.no_grad():
            losses.append(parallel(3 * X))

    assert parallel.optimizer is not None
    parallel.optimizer.register_step_post_hook(evaluate)
    parallel.train_step(X)
    expected = weights_after(1)
    assert losses and all(torch.equal(value, expected[name]) for name, value in parallel.full_state_dict().items())


def test_a_parameter_that_was_replaced_is_named() -> None:
    parallel = parallel_of()
    parallel.train_step(X)
    parallel.load_state_dict({name: value.clone() for name, value in parallel.state_dict().items()}, assign=True)
    with pytest.raises(
        AutoparError, match=r"group 0 of the optimizer has a parameter of shape \[16, 8\] .* by load_state_dict\(assign=True\)"
    ):
        parallel.train_step(X)


def test_after_a_call_that_fails_no_update_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, by a thread."""
    parallel, take, taken = parallel_of(offload="optimizer"), Updates.take, list[int]()
    parallel.train_step(X)
    optimizer = parallel.optimizer
    assert optimizer is not None
    step = optimizer.step

    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return step(*args)

    def failing(self: Updates, *args: Any) -> None:
        taken.append(1)
        if len(taken) == 3:
            raise torch.OutOfMemoryError("no memory")
        take(self, *args)

    monkeypatch.setattr(optimizer, "step", slow)
    monkeypatch.setattr(Updates, "take", failing)
    with pytest.raises(torch.OutOfMemoryError):
        parallel.train_step(X)
    before = [each.detach().clone() for each in parallel.parameters()]
    time.sleep(0.7)
    assert all(map(torch.equal, before, parallel.parameters()))
    assert all(len(group["params"]) == 4 for group in optimizer.param_groups)
