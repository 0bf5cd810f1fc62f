"""Penalties for mixing microbatches steer the search and are in no price that anybody reads."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.cost.model import MIXING_SECONDS
from autopar.partition.penalties import penalty_seconds
from autopar.partition.solver.evaluation import Evaluation
from autopar.plans.decisions import ShardingDecision
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.captures import compiled


class Normed(nn.Module):
    """Batch norms, whose statistics join the samples of a batch."""

    def __init__(self, num_norms: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(num_norms))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@cache
def parallel_normed(num_microbatches: int) -> ParallelModule:
    torch.manual_seed(0)
    options = {"cluster": "8xa100", "num_microbatches": num_microbatches, "microbatch_statistics": "own"}
    return compiled(Normed(), {"dp": 2}, (torch.randn(8, 8),), **options)


def decision(num_microbatches: int = 2) -> ShardingDecision:
    return parallel_normed(num_microbatches).compiled.search


def test_a_plan_that_mixes_costs_what_it_takes() -> None:
    found = decision()
    problem = found.sharding_problem.problem
    paid = penalty_seconds(problem, found.solution.picks)
    assert paid > 0 and paid == pytest.approx(round(paid / MIXING_SECONDS) * MIXING_SECONDS)
    assert Evaluation(problem).seconds(found.solution.picks) == pytest.approx(found.cost_seconds + paid, rel=1e-9)
    assert 0 < found.cost_seconds < MIXING_SECONDS / 10
    assert 0 <= found.lower_bound_seconds <= found.cost_seconds
    assert " ms a microbatch, at most " in str(found)


def test_what_mixes_more_is_no_alternative() -> None:
    found = decision()
    others = [found.runner_up(name) for name in found.sharding_problem.index]
    assert any(others) and all(each is None or abs(each.extra_seconds) < MIXING_SECONDS / 10 for each in others)
    penalised = [found.solution.runner_up(index) for index in found.sharding_problem.index.values()]
    assert any(each is not None and each.extra_seconds > MIXING_SECONDS / 2 for each in penalised)


def test_one_microbatch_pays_none() -> None:
    found = decision(1)
    assert penalty_seconds(found.sharding_problem.problem, found.solution.picks) == 0
    assert str(found).count(" ms a step, ") == 1


def test_nobody_reads_a_penalty() -> None:
    parallel = parallel_normed(2)
    assert parallel.summary()["search"]["seconds"] == decision().cost_seconds
    text = re.sub(r"found in [0-9.]+ s", "", parallel.explain(detail="all") + parallel.why("layers"))
    assert not re.search(r"\d s\b", text)
