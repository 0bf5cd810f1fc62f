"""Optimizers of the user's own that count their steps, in themselves or in the options of their groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import TrainStep
from autopar.errors import AutoparError
from tests.support.models.trained import TwoLayers


class WarmUp(torch.optim.Optimizer):
    def __init__(self, parameters: Any, counts: str) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})
        self.counts, self.calls = counts, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += self.counts == "itself"
        for group in self.param_groups:
            group["steps"] += self.counts == "group"
            for each in group["params"]:
                state = self.state[each]
                state["step"] = state.get("step", 0) + 1
                each -= group["lr"] / state["step"] * each.grad


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def parallel_of(counts: str, scope: Any, mesh: Any = None) -> autopar.ParallelModule:
    x, mesh = (X, autopar.virtual_mesh(dp=2)) if mesh is None else (X[:2], mesh)
    options: dict[str, Any] = {"optimizer": lambda parameters: WarmUp(parameters, counts), "train_step": TrainStep(update_scope=scope)}
    return autopar.compile(TwoLayers(), mesh, example_inputs=(x,), backend="eager", **options)


@pytest.mark.parametrize(("counts", "name"), [("itself", "calls"), ("group", "steps")])
def test_what_is_counted_for_all_is_refused_where_some_are_stepped(counts: str, name: str) -> None:
    with pytest.raises(AutoparError, match=f"the step of WarmUp changed its own '{name}' from 0 to 1: .*state\\[parameter\\]"):
        parallel_of(counts, "element").train_step(X)


@pytest.mark.parametrize(("counts", "scope"), [("itself", None), ("group", "model"), ("state", "element"), ("state", "parameter")])
def test_what_is_counted_otherwise_is_the_optimizers_own(counts: str, scope: Any) -> None:
    parallel = parallel_of(counts, scope)
    for _ in range(3):
        parallel.train_step(X)
    optimizer: Any = parallel.optimizer
    assert optimizer.calls in (0, 3) and optimizer.param_groups[0]["steps"] in (0, 3)
    assert {state["step"] for state in optimizer.state.values()} == {3}


@pytest.mark.parametrize("counts", ["itself", "group"])
def test_a_step_of_all_at_once_may_count(counts: str) -> None:
    options: dict[str, Any] = {"optimizer": lambda parameters: WarmUp(parameters, counts)}
    parallel = autopar.compile(
        TwoLayers(), autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager",
        train_step=TrainStep(update_scope="element", clip_grad_norm=100.0), **options,
    )  # fmt: skip
    for _ in range(3):
        parallel.train_step(X)
    optimizer: Any = parallel.optimizer
    assert optimizer.calls + optimizer.param_groups[0]["steps"] == 3


def in_a_plain_loop() -> list[int]:
    parallel, found = parallel_of("group", "element", init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))), list[int]()
    for counts in ("itself", "group"):
        optimizer = WarmUp(parallel.parameters(), counts)
        for _ in range(3):
            parallel(X[:2]).backward()
            optimizer.step()
        found += [optimizer.calls, optimizer.param_groups[0]["steps"]]
    return found


def test_a_plain_loop_on_processes_counts(gloo_ranks: Any) -> None:
    assert all(found == [3, 0, 0, 3] for found in gloo_ranks.run(in_a_plain_loop))
