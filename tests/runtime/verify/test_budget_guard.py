"""A first run that takes more than its budget raises, and names the fragment; later ones are not watched."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.memory import MemoryBudget
from autopar.errors import MemoryBudgetError
from tests.support.models.zoo import gpt2


def test_a_run_beyond_the_budget_names_the_fragment() -> None:
    case = gpt2(1).to(torch.float32)
    options = {"example_inputs": case.batch, "backend": "eager", "memory_budget": "1 GB", "optimizer": torch.optim.SGD}
    parallel = autopar.compile(case.model, autopar.virtual_mesh(tp=2), **options)
    predicted = parallel.memory().peak_bytes
    (captured,) = parallel._captures.values()
    whole = captured.compiled
    captured.compiled = replace(whole, budget=MemoryBudget(0.8 * predicted, whole.budget.optimizer))  # as if predicted to fit
    with pytest.raises(MemoryBudgetError, match=r"rank [01] took .*more than memory_budget=.*, during RUN f\d+ \(most at \w+.*:\d+ in "):
        parallel(**case.batch).loss.backward()
    parallel(**case.batch).loss.backward()
    parallel.zero_grad()
    with pytest.raises(MemoryBudgetError, match="leave a margin"):
        parallel.train_step(**case.batch)
    captured.compiled, captured.ran = whole, set()
    assert parallel.train_step(**case.batch).loss.isfinite()


def test_only_calls_that_update_make_the_state_that_is_counted() -> None:
    """The first of two calls that accumulate leaves it all to come."""
    case = gpt2(1).to(torch.float32)
    options = {"example_inputs": case.batch, "backend": "eager", "train_step": autopar.TrainStep(accumulate=2)}
    parallel = autopar.compile(case.model, autopar.virtual_mesh(tp=2), optimizer=torch.optim.AdamW, **options)
    steps: list[bool] = []
    for _ in range(2):
        call, *_ = parallel.start((), case.batch, updates=True)
        parallel._trainer.optimizer(parallel)
        steps.append(parallel._trainer.steps_within(call))
        parallel.train_step(**case.batch)
    assert steps == [False, True]


def steps_within_what_is_predicted(name: str) -> float:
    """The loss of a second step under a budget of what a first is predicted to take, and one in a hundred."""
    case = gpt2(1).to(torch.float32)

    def compiled(budget: str | int) -> Any:
        options = {"example_inputs": case.batch, "backend": "eager", "optimizer": getattr(torch.optim, name), "memory_budget": budget}
        return autopar.compile(copy.deepcopy(case.model), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), **options)

    parallel = compiled(int(1.01 * compiled("1 GB").memory().peak_bytes))
    parallel.train_step(**case.batch)
    return float(parallel.train_step(**case.batch).loss)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW"])
def test_state_counts_once(gloo_ranks: Any, name: str) -> None:
    """Adagrad makes it when it is made itself, within the first step; AdamW when it updates."""
    assert all(loss < 10 for loss in gloo_ranks.run(steps_within_what_is_predicted, name))
