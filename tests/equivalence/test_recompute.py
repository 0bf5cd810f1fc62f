"""What is computed again is computed the same: loss and gradients are the original's, whatever the backward does once more."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.errors import MemoryBudgetError
from autopar.ir.collectives import reshard
from autopar.ir.keys import RECOMPUTED, SHARDING
from autopar.ir.markers import held
from autopar.ir.units import in_bytes
from autopar.plans.keys import node_keys
from autopar.recompute.again import is_forward
from autopar.runtime.module.parallel_module import ParallelModule
from tests.equivalence.test_gloo import TOLERANCE, gradient_errors, parallel_and_reference, share
from tests.support.captures import compiled
from tests.support.live_bytes import LiveBytes
from tests.support.models import vision, zoo

MODELS = {"gpt2": zoo.gpt2, "llama": zoo.llama, "resnet": vision.resnet}
QUICK = {("llama", "selective", 2, 2), ("resnet", "full", 1, 2)}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in product(MODELS, ("none", "full", "selective"), (1, 2), (1, 2))
]


def prepared(name: str, pp: int = 1, tp: int = 1, num_layers: int = 2, **options: Any) -> tuple[ParallelModule, zoo.Batch]:
    torch.manual_seed(0)
    case = MODELS[name](num_layers, dropout=0.1)
    axes = {"pp": pp} | ({"tp": tp} if tp > 1 else {}) if pp > 1 else {"dp": 2 if tp > 1 else 1, "tp": tp}
    if name == "resnet" and pp > 1:
        options = {"num_microbatches": 2, "microbatch_statistics": "own"} | options
    return compiled(case.model, axes, case.batch, **options), case.batch


def again(parallel: ParallelModule) -> int:
    return sum(node in RECOMPUTED for node in parallel.compiled.program.graph.nodes)


@pytest.mark.parametrize(("name", "mode", "pp", "tp"), CASES)
def test_loss_and_gradients_are_the_originals(name: str, mode: str, pp: int, tp: int) -> None:
    parallel, batch = prepared(name, pp, tp, recompute=mode)
    report = parallel.verify(promote=True, **batch)
    if parallel.compiled.separated is None:
        assert report, str(report)
        assert report.worst <= 1e-9, str(report)
    else:  # batch norm by microbatches: what is promised is its own computation
        assert report.own_statistics_error is not None and report.own_statistics_error <= 1e-9, str(report)
    assert (again(parallel) > 0) == (mode != "none")
    assert parallel.summary()["flops_split"] >= 0.9, parallel.explain()


@cache
def alive_in_a_step(mode: str) -> tuple[int, float, int]:
    """Bytes after the forward, those predicted to be saved, the most of the step."""
    parallel, batch = prepared("gpt2", recompute=mode)
    parallel(**batch).loss.backward()  # whatever is made once
    gc.collect()
    with LiveBytes() as live:
        loss = parallel(**batch).loss
        gc.collect()
        alive = live.now
        loss.backward()
    return alive, parallel.summary()["memory"]["saved_activations"], live.peak


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_after_the_forward_less_is_alive_by_what_is_predicted(mode: str) -> None:
    alive, predicted, peaks = zip(*(alive_in_a_step(each) for each in ("none", mode)), strict=True)
    assert predicted[0] - predicted[1] > 0.3 * predicted[0]
    assert alive[0] - alive[1] == pytest.approx(predicted[0] - predicted[1], rel=1e-3)  # numbers beside it: the step, the scale of the loss
    assert peaks[1] < peaks[0]


class Layer(nn.Module):
    """Few ops for Inductor to compile, whose results the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.linear(x)).sin().exp(), 0.1, self.training)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_the_default_backend_runs_it() -> None:
    torch.manual_seed(0)
    model, x = Layers().double(), torch.randn(8, 8, dtype=torch.float64)
    found = []
    for options in ({"recompute": "full", "backend": "inductor"}, {"recompute": "none"}):
        parallel = compiled(model, {"dp": 2}, (x,), **options)
        model.zero_grad()
        torch.manual_seed(1)
        loss = parallel(x)
        loss.backward()
        found.append((again(parallel), loss.detach(), [parameter.grad for parameter in model.parameters()]))
    assert found[0][0] > 0 == found[1][0]
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-6, atol=1e-9)


def test_gradient_checkpointing_of_transformers_is_a_request() -> None:
    torch.manual_seed(0)
    case = zoo.gpt2(2, dropout=0.1)
    case.model.gradient_checkpointing_enable()
    parallel = compiled(case.model, {"dp": 2, "tp": 2}, case.batch)
    report = parallel.verify(promote=True, **case.batch)
    assert report and report.worst <= 1e-9, str(report)
    found = parallel.summary()["recompute"]
    assert found is not None and found["saved_bytes"] < 0.5 * found["saved_bytes_before"]
    assert "the model's 2 checkpointed regions" in found["reason"]


@pytest.mark.parametrize(
    ("name", "pp", "tp", "seed"),
    [pytest.param("llama", 2, 2, 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in product(MODELS, (1, 2), (1, 2), (1, 2)))],
)
def test_whatever_is_kept_and_computed_again_it_is_the_same(name: str, pp: int, tp: int, seed: int) -> None:
    """Any set of calls may be computed again, partial sums, collectives and masks among them."""
    parallel, batch = prepared(name, pp, tp, recompute="none")
    program = next(step.program for step in parallel.compiled.steps if step.name == "choose order")
    keys = [key for node, key in node_keys(program, with_reshards=True).items() if is_forward(node)]
    chosen = random.Random(seed).sample(keys, len(keys) // 2)
    plan = replace(parallel.plan, recomputed=tuple(chosen))
    parallel, batch = prepared(name, pp, tp, plan=plan)
    assert again(parallel) > 20
    report = parallel.verify(promote=True, **batch)
    own = report.own_statistics_error
    assert (report.worst if own is None else own) <= 1e-9, str(report)


class Tokens(nn.Module):
    """Cross entropy over classes that are split: ranks reduce maxima and logarithms of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 32), nn.Linear(32, 64)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.tokens(tokens)), labels)


def reduces_what_is_no_sum(node: fx.Node) -> bool:
    return node.target is reshard and any(kind != "sum" for _, kind in SHARDING[node.args[0]][0].unreduced)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_maxima_and_logarithms_of_sums_are_reduced_again(share: float) -> None:
    """Alone, with some and with all of the forward: of their operands, no rank can save its part."""
    torch.manual_seed(0)
    model, batch = Tokens(), (torch.randint(8, (256,)), torch.randint(64, (256,)))
    parallel = compiled(model, {"tp": 2}, batch, recompute="none")
    program = next(step.program for step in parallel.compiled.steps if step.name == "choose order")
    keys = {key: node for node, key in node_keys(program, with_reshards=True).items() if is_forward(node)}
    reduced = [key for key, node in keys.items() if reduces_what_is_no_sum(node)]
    others = [key for key in keys if key not in reduced]
    assert reduced and others
    chosen = (*reduced, *random.Random(0).sample(others, int(share * len(others))))
    parallel = compiled(model, {"tp": 2}, batch, plan=replace(parallel.plan, recomputed=chosen))
    report = parallel.verify(*batch, promote=True)
    assert report and report.worst <= 1e-9, str(report)


@cache
def priced(mode: str, num_layers: int = 2) -> ParallelModule:
    return prepared("gpt2", num_layers=num_layers, cluster="8xh100", recompute=mode, optimizer="adam")[0]


def peak_of(mode: str, num_layers: int = 2) -> float:
    """The most that the only rank holds in a step."""
    return priced(mode, num_layers).memory().peak_bytes


@cache
def peak_of_what_keeps_all(num_layers: int = 2) -> float:
    """Where a budget has the backward free early."""
    options = {"cluster": "8xh100", "optimizer": "adam", "recompute": "none", "num_layers": num_layers}
    return prepared("gpt2", memory_budget=0.99 * peak_of("none", num_layers), **options)[0].memory().peak_bytes


@pytest.mark.parametrize("share", [0.4, pytest.param(0.05, marks=pytest.mark.slow), pytest.param(0.8, marks=pytest.mark.slow)])
def test_within_a_budget_the_cheapest_set_is_computed_again(share: float) -> None:
    """At `share` of the way from computing all layers again to keeping all."""
    budget = (1 - share) * peak_of("full") + share * peak_of_what_keeps_all()
    parallel, batch = prepared("gpt2", cluster="8xh100", memory_budget=budget, optimizer="adam")
    assert parallel.verify(promote=True, **batch)
    found, full = parallel.summary()["recompute"], priced("full").summary()["recompute"]
    assert found is not None and full is not None
    assert 0 < found["seconds"] < full["seconds"] and found["saved_bytes"] > full["saved_bytes"]
    assert found["reason"].startswith(f"for the budget of {in_bytes(budget)}") and "bound" in found["reason"].split("(")[1]


def test_copies_that_are_there_all_step_are_no_reason_to_keep_less() -> None:
    """Of ZeRO's levels 1 and 2: read again they take nothing, and no choice adds less time than the bound says."""
    case = zoo.llama(2).to(torch.float32)
    whole = sum(each.nbytes for each in case.model.parameters())
    parallel = compiled(case.model, {"dp": 2, "tp": 2}, case.batch, cluster="8xh100", memory_budget=4.4 * whole, optimizer="adamw")
    assert any(node.target is held for node in parallel.compiled.program.graph.nodes)
    found = parallel.summary()["recompute"]
    assert found is not None
    assert float(found["reason"].split("(")[1].split(" %")[0]) > -0.1, found["reason"]


def test_a_budget_that_only_recomputation_meets_is_met() -> None:
    """Where the search refuses all that keeps everything."""
    least = peak_of("full")
    options = {"cluster": "8xh100", "optimizer": "adam"}
    with pytest.raises(MemoryBudgetError):
        prepared("gpt2", recompute="none", memory_budget=1.1 * least, **options)
    parallel, batch = prepared("gpt2", memory_budget=1.1 * least, **options)
    assert parallel.verify(promote=True, **batch)
    with pytest.raises(MemoryBudgetError, match="no plan"):
        prepared("gpt2", memory_budget=0.5 * least, **options)


@pytest.mark.parametrize(
    ("pp", "tp", "share"),
    [(1, 1, 1.15), (2, 1, 0.95), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 2, 1.15), (2, 2, 0.95)])],
)
def test_about_what_all_layers_again_need_is_met(pp: int, tp: int, share: float) -> None:
    """The search, which counts gradients and saved values as if all were there at once, may refuse that."""
    options = {"cluster": "8xh100", "optimizer": "sgd"} | ({"num_microbatches": 2} if pp > 1 else {})
    full, _ = prepared("gpt2", pp, tp, recompute="full", **options)
    parallel, batch = prepared("gpt2", pp, tp, memory_budget=share * full.memory().peak_bytes, **options)
    assert parallel.memory().fits
    report = parallel.verify(promote=True, **batch)
    assert report and report.worst <= 1e-9, str(report)
    found, whole = parallel.summary()["recompute"], full.summary()["recompute"]
    assert found is not None and whole is not None and found["reason"].startswith("for the budget")
    if pp == 1:
        assert found["seconds"] < 0.5 * whole["seconds"]


def on_a_rank(mode: str) -> dict[str, Any]:
    parallel, reference, batch = parallel_and_reference("gpt2", recompute=mode)
    parallel(**share(batch)).loss.backward()
    reference(**batch).loss.backward()
    error = max(gradient_errors(parallel, reference).values())
    with LiveBytes() as live:
        loss = parallel(**share(batch)).loss
        gc.collect()
        alive = live.now
    loss.backward()
    return {"error": error, "alive": alive, "calls": again(parallel)}


def test_on_processes_it_is_the_same_and_less_is_alive(gloo_ranks: Any) -> None:
    kept, found = (gloo_ranks.run(on_a_rank, mode) for mode in ("none", "full"))
    for before, after in zip(kept, found, strict=True):
        assert after["calls"] > 20 and after["alive"] < 0.5 * before["alive"]
        assert max(before["error"], after["error"]) < TOLERANCE
