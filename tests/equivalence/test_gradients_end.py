"""Where gradients end: regions under no_grad, detached values, parameters that get none. As eager PyTorch has it, loss and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Between(nn.Module):
    """`change(module, h)` stands between two equal layers; the parameter `scale` is its own."""

    def __init__(self, change: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(8, 8), nn.Linear(8, 8), change
        self.scale = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self, self.first(x))).square().mean()


def written(module: Between, h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2.0)
    return h


def part_written(module: Between, h: Tensor) -> Tensor:
    with torch.no_grad():
        h[:, :4].mul_(2.0)
    return h


def detached_written(module: Between, h: Tensor) -> Tensor:
    h.detach().mul_(2.0)
    return h


def handed_back(module: Between, h: Tensor) -> Tensor:
    with torch.no_grad():
        same, double = h, h * 2
    return same + double


def gradients_within(module: Between, h: Tensor) -> Tensor:
    with torch.no_grad():
        double = h * 2
        with torch.enable_grad():
            scaled = module.scale * h
    return double + scaled


def straight_through(module: Between, h: Tensor) -> Tensor:
    return h + (torch.round(h) - h).detach()


def by_decorator(module: Between, h: Tensor) -> Tensor:
    return h * torch.no_grad()(lambda values: values.softmax(-1))(h)


def cut_off(module: Between, h: Tensor) -> Tensor:
    """The first layer gets no gradient, the last, of its shape, does."""
    return h.detach()


def written_elsewhere(module: Between, h: Tensor) -> Tensor:
    double = torch.zeros_like(h)
    with torch.no_grad():
        torch.mul(h, 2, out=double)
    return h + double


def detached_before_it_is_written(module: Between, h: Tensor) -> Tensor:
    """What is detached shares the memory of a value that gets a gradient later, and has none."""
    total = torch.zeros(8, dtype=h.dtype)
    fixed = total[None].detach()
    total.add_(module.scale)
    return h * fixed


def data_of_a_value(module: Between, h: Tensor) -> Tensor:
    return h * h.data


def data_written(module: Between, h: Tensor) -> Tensor:
    h.data.mul_(2.0)
    return h


def data_of_a_parameter(module: Between, h: Tensor) -> Tensor:
    return h * module.scale + module.scale.data.sum()


CHANGES = [
    written,
    part_written,
    detached_written,
    handed_back,
    gradients_within,
    straight_through,
    by_decorator,
    cut_off,
    written_elsewhere,
    detached_before_it_is_written,
    data_of_a_value,
    data_written,
    data_of_a_parameter,
]
X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_eagers(change: Callable[[Between, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Between(change).double()
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=(X,), backend="eager")
    losses = [module(X) for module in (parallel, reference)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)
    assert parallel.verify(X) and parallel.summary()["flops_split"] >= 0.98


def test_inference_mode_inside_is_refused_in_training() -> None:
    def inferred(module: Between, h: Tensor) -> Tensor:
        with torch.inference_mode():
            double = h * 2
        return h + double.clone()

    model = Between(inferred).double()
    with pytest.raises(CaptureError, match=r"torch\.inference_mode\(\).*use torch\.no_grad\(\)"):
        autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
    with torch.no_grad():
        parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
        torch.testing.assert_close(parallel(X), model(X))
