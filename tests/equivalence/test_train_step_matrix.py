"""Whole steps as a trainer has them, twenty with clipping and with accumulation over three calls: every optimizer on every kind of mesh
leaves the parameters of the plain loop on one device."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.support.models.trained import Lamb, batch, muon, small_gpt

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MESHES: dict[str, dict[str, Any]] = {
    "dp2 tp2": {"mesh": {"dp": 2, "tp": 2}},
    "pp2": {"mesh": {"pp": 2}, "num_microbatches": 2},
    "budget": {"mesh": {"dp": 2, "tp": 2}, "cluster": "8xH100"},
}
# The optimizer, and with how many bytes parameters must be split over dp.
OPTIMIZERS: dict[str, tuple[Make, int]] = {
    "adamw": (partial(torch.optim.AdamW, lr=1e-2), 92_000),
    "momentum": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 76_000),
    "adafactor": (partial(torch.optim.Adafactor, lr=1e-2), 76_000),
    "lamb": (Lamb, 112_000),
    "muon": (muon, 96_000),
}
STEPS, CLIP, ACCUMULATE, TOLERANCE = 20, 0.3, 3, 1e-9


def plain(model: nn.Module, make: Make) -> list[Tensor]:
    """The losses of the loop that a user writes."""
    optimizer, losses = make(model.parameters()), []
    for step in range(STEPS * ACCUMULATE):
        losses.append(model(**batch(step)))
        (losses[-1] / ACCUMULATE).backward()
        if (step + 1) % ACCUMULATE == 0:
            assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP, "clipping must bite"
            optimizer.step()
            model.zero_grad()  # Muon has the matrices alone
    return [each.detach() for each in losses]


@contextmanager
def promoted() -> Iterator[None]:
    """Muon multiplies in bfloat16; here in float64, in which everything else is."""
    with patch.object(sys.modules["torch.optim._muon"], "_zeropower_via_newtonschulz", _newton_schulz):
        yield


def _newton_schulz(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """torch's, but for the dtype."""
    a, b, c = ns_coefficients
    x = grad.mT if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if grad.size(0) > grad.size(1) else x


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), list(product(OPTIMIZERS, MESHES)))
def test_clipped_and_accumulated_steps_are_those_of_the_plain_loop(name: str, where: str) -> None:
    (make, budget), options = OPTIMIZERS[name], dict(MESHES[where])
    if where == "budget":
        options["memory_budget"] = budget
    model = small_gpt()
    reference = copy.deepcopy(model)
    mesh = autopar.virtual_mesh(**options.pop("mesh"))
    step_options = autopar.TrainStep(clip_grad_norm=CLIP, accumulate=ACCUMULATE)
    parallel = autopar.compile(model, mesh, example_inputs=batch(0), backend="eager", optimizer=make, train_step=step_options, **options)
    with promoted():
        losses = [parallel.train_step(**batch(step)) for step in range(STEPS * ACCUMULATE)]
        wanted = plain(reference, make)
    assert max(abs(float(one - other)) for one, other in zip(losses, wanted, strict=True)) <= TOLERANCE
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert max(float((one - other).detach().abs().max()) for one, other in pairs) <= TOLERANCE
    assert all(each.grad is None for each in model.parameters())
    if where == "budget":
        inputs = parallel.compiled.local.signature.inputs_of("parameter")
        assert any("dp" in item.sharding.axes for item in inputs if item.sharding), "the budget must split parameters over dp"
