"""What cannot be captured is refused in one line of the user's terms, never frozen."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh


class Calling(nn.Module):
    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(4, 4), compute
        self.own, self.numpys = random.Random(1), np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.linear(x)).square().mean()


def penalty(self: Calling, y: Tensor) -> Tensor:
    x = torch.ones_like(y).requires_grad_()
    return torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)[0] + y


RANDOM = "forward draws numbers by Python's or numpy's random, .*draw by torch.rand"
OWN = "forward has a random generator or seed of its own"
CLOCK = "forward reads the clock"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "random.random": (lambda self, y: y * random.random(), RANDOM),
    "random.randint": (lambda self, y: y * random.randint(1, 5), RANDOM),
    "random.choice": (lambda self, y: y * random.choice([1.0, 2.0]), RANDOM),
    "a branch": (lambda self, y: y * 2 if random.random() < 0.5 else y, RANDOM),
    "a Random of its own": (lambda self, y: y * self.own.random(), RANDOM),
    "numpy.random.rand": (lambda self, y: y * np.random.rand(), RANDOM),
    "a numpy generator": (lambda self, y: y * self.numpys.random(), RANDOM),
    "a torch generator": (lambda self, y: y * torch.rand(4, generator=torch.Generator().manual_seed(0)), OWN),
    "a seed": (lambda self, y: y * torch.rand(4) if torch.manual_seed(0) else y, OWN),
    "time.time": (lambda self, y: y * time.time(), CLOCK),
    "time.perf_counter": (lambda self, y: y * time.perf_counter(), CLOCK),
    "a gradient": (penalty, "forward differentiates"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_capture_would_freeze_is_refused_with_the_way_out(kind: str) -> None:
    compute, expected = REFUSED[kind]
    with pytest.raises(CaptureError, match=f"(?s){expected}") as caught:
        capture(Calling(compute), (torch.zeros(8, 4),), {}, virtual_mesh(dp=2))
    first, where, mend = str(caught.value).splitlines()[:3]
    assert "forward" in first and "where:" in where and "how to mend it:" in mend
