"""What a user reads when nothing fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import virtual_mesh
from autopar.errors import MemoryBudgetError

WIDTH = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.second = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def refusal(budget: float, **options: object) -> str:
    with pytest.raises(MemoryBudgetError) as caught:
        autopar.compile(
            Net(), virtual_mesh(dp=2, tp=2), example_inputs=(torch.randn(8, WIDTH),), backend="eager", memory_budget=budget, **options
        )
    return str(caught.value)


PARAMETERS = 2 * WIDTH * 4 * WIDTH * 4
"""Bytes of both weights; with gradients and Adam's state four times as much, and a quarter of that on each of four ranks."""


def test_the_parts_are_named_and_a_larger_budget_is_priced() -> None:
    text = refusal(0.9 * PARAMETERS)
    assert text.startswith("no plan fits into memory_budget=29.5 kB: by the search's count a rank needs ")
    assert "32.8 kB  parameters, with gradients and 2 copies for adam" in text
    assert "saved for the backward" in text and "while it runs" in text
    assert "memory_budget=" in text.split("ways out, and what a step then takes:")[1]


def test_a_pin_that_stands_in_the_way_is_named_and_can_be_dropped() -> None:
    text = refusal(2.2 * PARAMETERS, pins={"first.weight": ()})
    conflicts, ways = text.split("what conflicts:")[1].split("ways out, and what a step then takes:")
    assert "first.weight pinned by the user" in conflicts and "memory_budget=" in conflicts
    assert "drop the pins" in ways


def test_an_optimizer_with_less_state_is_a_way_out() -> None:
    assert 'optimizer="sgd": no state' in refusal(1.15 * PARAMETERS)


def test_what_fits_is_no_refusal() -> None:
    parallel = autopar.compile(
        Net(), virtual_mesh(dp=2, tp=2), example_inputs=(torch.randn(8, WIDTH),), backend="eager", memory_budget=2.0 * PARAMETERS
    )
    assert parallel.verify(torch.randn(8, WIDTH), promote=True)
    assert parallel.summary()["search"]["held_bytes"] <= 2.0 * PARAMETERS


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, WIDTH)
        self.head = nn.Linear(WIDTH, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), ids.flatten())


def test_of_a_pipeline_it_is_told_what_one_rank_is_asked_for() -> None:
    """Its stages share the program; microbatches are no axis that could split more, nor is `dp`, which is not there."""
    ids = torch.arange(8 * 6).view(8, 6)
    with pytest.raises(MemoryBudgetError) as caught:
        autopar.compile(Table(), virtual_mesh(pp=2), example_inputs=(ids,), backend="eager", memory_budget=5_000)
    text, ways = str(caught.value).split("ways out, and what a step then takes:")
    assert text.startswith(
        "no plan fits into memory_budget=5.0 kB: by the search's count a rank needs 59.6 kB at the least, where all 2 stages need as much"
    )
    assert "37.4 kB  parameters, with gradients and 2 copies for adam" in text
    assert "memory_budget=59.6 kB" in ways and "mb" not in ways and "dp" not in ways
