"""`train_step` is the plain loop: as many steps leave the same parameters, on any mesh, whatever happens inside the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar import LossScale, TrainStep
from autopar.errors import AutoparError
from autopar.ir.instructions import Update
from tests.support.models.trained import Lamb, batch, muon, small_gpt

MESHES: dict[str, dict[str, Any]] = {
    "dp2 tp2": {"mesh": {"dp": 2, "tp": 2}},
    "pp2": {"mesh": {"pp": 2}, "num_microbatches": 2},
    "budget": {"mesh": {"dp": 2, "tp": 2}, "cluster": "8xH100"},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "lamb": Lamb,
    "muon": muon,
}
NUM_BLOCKS = {"dp2 tp2": 1, "pp2": 1, "budget": 2}
# Bytes with which parameters must be split over dp, by how much state there is to a parameter.
BUDGETS = {"adamw": 124_000, "lamb": 164_000, "momentum": 108_000, "muon": 108_000, "adafactor": 92_000}
TOLERANCE = 1e-9
NUM_STEPS, NUM_CALLS = 8, 8


def compiled(where: str, model: nn.Module, backend: str = "eager", **options: Any) -> autopar.ParallelModule:
    chosen = dict(MESHES[where])
    mesh = autopar.virtual_mesh(**chosen.pop("mesh"))
    return autopar.compile(model, mesh, example_inputs=batch(0), backend=backend, **chosen, **options)


def plain_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: float | None = None, accumulate: int = 1
) -> list[Tensor]:
    """The loop that a user writes."""
    losses = []
    for step in range(steps):
        losses.append(model(**batch(step)))
        (losses[-1] / accumulate).backward()
        if (step + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in losses]


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


CASES = [
    pytest.param(name, where, marks=() if where == "dp2 tp2" or name == "adamw" else pytest.mark.slow)
    for name in OPTIMIZERS
    for where in MESHES
]


@pytest.mark.parametrize(("name", "where"), CASES)
def test_steps_leave_the_parameters_of_the_plain_loop(name: str, where: str) -> None:
    model, make = small_gpt(num_blocks=NUM_BLOCKS[where]), OPTIMIZERS[name]
    reference = copy.deepcopy(model)
    budget = {"memory_budget": BUDGETS[name]} if where == "budget" else {}
    parallel = compiled(where, model, optimizer=make, **budget)
    losses = [parallel.train_step(**batch(step)) for step in range(NUM_STEPS)]
    wanted = plain_losses(reference, make(reference.parameters()), NUM_STEPS)
    assert all(abs(float(one - other)) <= TOLERANCE for one, other in zip(losses, wanted, strict=True))
    assert difference(model, reference) <= TOLERANCE
    assert not any(loss.requires_grad for loss in losses) and all(each.grad is None for each in model.parameters())
    if where == "budget":
        lies_over_dp = [item for item in parallel.compiled.local.signature.inputs_of("parameter") if "dp" in item.sharding.axes]
        assert lies_over_dp, "the budget must split parameters over dp"


@pytest.mark.parametrize("where", ["dp2 tp2", "pp2", pytest.param("budget", marks=pytest.mark.slow)])
def test_clipping_and_accumulation_are_those_of_the_plain_loop(where: str) -> None:
    model = small_gpt(num_blocks=NUM_BLOCKS[where])
    reference = copy.deepcopy(model)
    options = autopar.TrainStep(clip_grad_norm=0.3, accumulate=3)
    budget = {"memory_budget": BUDGETS["adamw"]} if where == "budget" else {}
    parallel = compiled(where, model, optimizer=(torch.optim.AdamW, {"lr": 1e-2}), train_step=options, **budget)
    for step in range(NUM_CALLS):
        parallel.train_step(**batch(step))
    plain_losses(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), NUM_CALLS, clip=0.3, accumulate=3)
    assert difference(model, reference) <= TOLERANCE
    # Two calls of the third step are there.
    errors = [float((one.grad - other.grad).abs().max()) for one, other in zip(model.parameters(), reference.parameters(), strict=True)]
    assert max(errors) <= TOLERANCE


def test_accumulation_without_agreement_updates_bucket_by_bucket() -> None:
    model = small_gpt()
    reference = copy.deepcopy(model)
    parallel = compiled("dp2 tp2", model, optimizer=torch.optim.SGD, train_step=autopar.TrainStep(accumulate=3))
    for step in range(7):
        parallel.train_step(**batch(step))
    plain_losses(reference, torch.optim.SGD(reference.parameters()), 7, accumulate=3)
    assert difference(model, reference) <= TOLERANCE
    assert parallel.compiled.updating is not None
    assert sum(isinstance(each, Update) for each in parallel.compiled.updating.places[0].instructions) > 1


class Sometimes(nn.Module):
    """A parameter that is frozen, and one that a call without `extra` does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.frozen, self.extra = small_gpt(), nn.Parameter(torch.ones(2).double()), nn.Parameter(torch.ones(2).double())
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor, extra: bool = True) -> Tensor:
        return self.gpt(tokens, labels) * self.frozen.sum() + (self.extra.square().sum() if extra else 0.0)


def test_what_a_step_does_not_update_is_averaged_too() -> None:
    model = Sometimes()
    parallel = autopar.compile(
        model,
        autopar.virtual_mesh(tp=2),
        example_inputs=batch(0),
        backend="eager",
        optimizer=torch.optim.AdamW,
        train_step=TrainStep(ema=0.9, accumulate=2),
    )
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(8):
        if step == 3:
            model.frozen.data.mul_(2.0)
        parallel.train_step(**batch(step), extra=step < 4)
        if step % 2:
            averaged.update_parameters(model)
    assert parallel.ema.keys() == dict(model.named_parameters()).keys()
    for name, wanted in averaged.module.named_parameters():
        torch.testing.assert_close(parallel.ema[name], wanted.detach(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("where", ["dp2 tp2", "pp2"])
def test_averages_are_those_of_torch(where: str) -> None:
    model = small_gpt()
    reference = copy.deepcopy(model)
    parallel = compiled(where, model, optimizer=torch.optim.AdamW, train_step=autopar.TrainStep(ema=0.9))
    averaged, optimizer = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9)), torch.optim.AdamW(reference.parameters())
    assert parallel.ema == {}
    for step in range(4):
        parallel.train_step(**batch(step))
        reference(**batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(reference)
    for name, wanted in averaged.module.named_parameters():
        torch.testing.assert_close(parallel.ema[name], wanted, atol=TOLERANCE, rtol=0)


def test_schedulers_of_learning_rates_and_the_plain_loop_see_the_same_optimizer() -> None:
    model = small_gpt()
    reference = copy.deepcopy(model)
    parallel = compiled("dp2 tp2", model, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    optimizers = [parallel.optimizer, torch.optim.AdamW(reference.parameters(), lr=1e-2)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in optimizers]
    for step in range(6):
        if step % 2:
            parallel.train_step(**batch(step))
        else:
            parallel(**batch(step)).backward()
            parallel.optimizer.step()
            parallel.optimizer.zero_grad()
        reference(**batch(step)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        for each in schedulers:
            each.step()
    assert difference(model, reference) <= TOLERANCE
    assert parallel.optimizer.param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"] == 1e-2 / 8
    assert len(parallel.optimizer.state) == len(list(model.parameters()))


class TwoHeads(nn.Module):
    """Which head is used is said in the call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return (self.one if first else self.two)(torch.tanh(self.body(x))).square().mean()


def test_on_the_default_backend() -> None:
    model, x = TwoHeads().double(), torch.randn(3, 4, 4, dtype=torch.float64)
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for each in x:
        parallel.train_step(each, True)
        reference(each, True).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(model, reference) <= TOLERANCE


def test_what_an_earlier_call_of_a_cycle_used_is_updated_with_the_others() -> None:
    model, plain, x = TwoHeads().double(), TwoHeads().double(), torch.randn(4, 4, dtype=torch.float64)
    options = {"optimizer": (torch.optim.SGD, {"lr": 0.1}), "train_step": TrainStep(accumulate=2), "backend": "eager"}
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), **options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for first in (True, False):
            parallel.train_step(x, first)
            (plain(x, first) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        assert ours.grad is None


def test_lbfgs_takes_no_options_that_it_would_not_keep() -> None:
    parallel = autopar.compile(
        TwoHeads(), autopar.virtual_mesh(dp=2), optimizer=torch.optim.LBFGS, train_step=TrainStep(accumulate=2), backend="eager"
    )
    with pytest.raises(AutoparError, match="asks for the loss several times"):
        parallel.train_step(torch.randn(4, 4), True)


def test_a_gradient_of_another_scale_is_refused() -> None:
    parallel = autopar.compile(
        TwoHeads(),
        autopar.virtual_mesh(dp=2),
        optimizer=torch.optim.SGD,
        train_step=TrainStep(loss_scale=LossScale()),
        backend="eager",
    )
    x = torch.randn(4, 4)
    parallel(x, True).backward()
    with pytest.raises(AutoparError, match="has a gradient already"):
        parallel.train_step(x, True)
