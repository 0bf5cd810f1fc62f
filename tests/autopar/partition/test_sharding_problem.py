"""What the prices of a plan, which are kept as long as it is, hold on to."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from autopar.partition import sharding_problem
from autopar.partition.sharding_problem import ShardingProblem
from tests.support.captures import compiled


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu()).square().mean()


def test_the_prices_of_a_plan_do_not_hold_a_program(monkeypatch: Any) -> None:
    graphs, of = list[weakref.ref[Any]](), ShardingProblem.of

    def seen(program: Any, *args: Any, **kwargs: Any) -> ShardingProblem:
        graphs.append(weakref.ref(program.graph))
        return of(program, *args, **kwargs)

    monkeypatch.setattr(sharding_problem.ShardingProblem, "of", seen)
    kept = compiled(Net(), {"dp": 2, "tp": 2}, (torch.randn(8, 8),)).compiled.search.sharding_problem
    gc.collect()
    assert graphs and all(graph() is None for graph in graphs), "the graph lives as long as its prices do"
    assert kept.problem.nodes and kept.index
