"""What is chosen fits, and nothing that was left out would have fitted at less: against every set of a small model's large values."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from torch import Tensor, nn

from autopar.cost.memory import MemoryBudget
from autopar.ir.keys import SOURCE
from autopar.ir.program import Program
from autopar.pipeline.stage_work import Work
from autopar.recompute.choices import layers, within
from autopar.recompute.fit import Fit
from autopar.recompute.inside import InsideBytes
from autopar.recompute.layer_values import layers_of
from autopar.recompute.segments import segments
from autopar.recompute.walk import trace
from tests.support.captures import compiled
from tests.support.models.residual import WIDTH, Mlp, Residual, batch

WORDS = 256


class LargeHead(Residual):
    """The peak is where the backward begins."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__(num_blocks=2)
        self.table, self.norm, self.head = nn.Embedding(words, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


class Wide(nn.Module):
    """Layers that need more than the head does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), Mlp(), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@cache
def placed(kind: str) -> tuple[Program, Fit]:
    """A program as recomputation gets it, and what counts without a limit."""
    (ids,) = batch()
    model, inputs = (LargeHead(), (ids,)) if kind == "head" else (Wide(), (nn.functional.one_hot(ids % WIDTH, WIDTH).float(),))
    parallel = compiled(model, {"dp": 1}, inputs, cluster="cpu", optimizer="sgd")
    program = next(step.program for step in parallel.compiled.steps if step.name == "choose order")
    return program, Fit(program, parallel.compiled.cost, segments(program), MemoryBudget(1e12, parallel.compiled.cost.optimizer))


def fitted(kind: str, budget: float) -> Fit:
    program, free = placed(kind)
    return Fit(program, free.cost, free.groups, MemoryBudget(budget, free.cost.optimizer))


@cache
def all_sets(kind: str) -> list[tuple[float, float]]:
    """Peak and seconds of every set of the values of a kilobyte or more."""
    program, free = placed(kind)
    work, groups = Work(program), dict(free.groups)
    found = layers_of(work, free.cost, groups, dict.fromkeys(groups, 0), within(program, groups))
    stage = trace(work, free.cost, 0, InsideBytes(free.cost))
    choices = []
    for layer in found:
        timeline = layer.timeline(stage)
        for each in timeline.decisions:
            if sum(timeline.values[number].bytes for number in each) > 1000:
                choices.append((layer, timeline, each))
    assert 4 <= len(choices) <= 8
    sets = []
    for chosen in itertools.chain.from_iterable(itertools.combinations(choices, size) for size in range(len(choices) + 1)):
        names = frozenset[str]()
        for layer in found:
            mine = [(timeline, each) for other, timeline, each in chosen if other is layer]
            again = mine[0][0].closed(itertools.chain.from_iterable(each for _, each in mine)) if mine else frozenset[int]()
            assert again is not None
            names |= layer.names(again)
        sets.append((free.peak_bytes(names), free.seconds(names)))
    return sets


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("kind", ["head", "wide"])
def test_nothing_that_fits_takes_less(kind: str, share: float) -> None:
    sets = all_sets(kind)
    least, most = min(peak for peak, _ in sets), max(peak for peak, _ in sets)
    budget = least + share * (most - least)
    fit = fitted(kind, budget)
    decision = fit.decide()
    assert decision.fits and decision.peak_bytes <= budget
    best = min(seconds for peak, seconds in sets if peak <= budget)
    assert fit.seconds(decision.nodes) <= 1.02 * best
    assert fit.lower_bound_seconds() <= fit.seconds(decision.nodes)


def test_what_lies_in_no_layer_is_computed_again_where_the_layers_are_not_enough() -> None:
    program, free = placed("head")
    of_layers = free.peak_bytes(within(program, layers(program)))
    decision = fitted("head", of_layers - 100).decide()
    assert decision.fits and decision.peak_bytes <= of_layers - 100
    assert any(SOURCE[node].module == "norm" for node in program.graph.nodes if node.name in decision.nodes)


def test_where_nothing_fits_the_least_is_told() -> None:
    least = min(peak for peak, _ in all_sets("wide"))
    decision = fitted("wide", 0.5 * least).decide()
    assert not decision.fits and decision.peak_bytes <= least
    assert "are the least that was found" in decision.reason
