"""Ops that give a tensor another shape in place: from there on its names mean the view, and views made before are what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError

X = torch.randn(8, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, changed: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.changed = nn.Linear(8, 8, dtype=torch.float64), changed

    def forward(self, x: Tensor) -> Tensor:
        return self.changed(self, self.linear(x))


def places() -> Tensor:
    return (torch.arange(288, dtype=torch.float64).view(8, 6, 6) * 0.1).cos()


def squares(h: Tensor) -> Tensor:
    """Matrices, of which a transpose has the shape of what it is of."""
    return (h @ h.roll(1, 1).mT) * 1


def behind_a_view(model: Model, h: Tensor) -> Tensor:
    d = squares(h)
    before = d.mT
    d.transpose_(1, 2)
    d[:, 0] += 1
    return (before * places()).sum()


def behind_a_part(model: Model, h: Tensor) -> Tensor:
    d = squares(h)
    before = d[:, :, 1:]
    d.transpose_(1, 2)
    d[:, 0] *= 2
    return (before * places()[:, :, 1:] + d.exp()[:, :, 1:]).sum()


def under_two_names(model: Model, h: Tensor) -> Tensor:
    d = h * 1
    other = d.add_(1)
    d.transpose_(1, 2)
    return (other.sin() * d).mean(1).square().sum()


def one_after_another(model: Model, h: Tensor) -> Tensor:
    d = (h * 1).mul_(2).swapaxes_(1, 2).add_(1)
    d.unsqueeze_(1).squeeze_(1)
    d.squeeze_()
    return d.as_strided_((8, 8, 6), (48, 1, 8)).cumsum(1).sin().sum()


def of_a_mask(model: Model, h: Tensor) -> Tensor:
    mask = (h.detach()[..., 0] > 0).double()
    mask.unsqueeze_(-1)
    return (h * mask).sum()


def of_a_part(model: Model, h: Tensor) -> Tensor:
    d = h * 1
    d[0].t_()
    return d.sin().sum()


def without_gradients(model: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        weights = h * 2
        weights.transpose_(1, 2)
    return (weights.mT * h).sum()


@pytest.mark.parametrize(
    "changed", [behind_a_view, behind_a_part, under_two_names, one_after_another, of_a_mask, of_a_part, without_gradients]
)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=["dp2 tp2", "pp2 dp2"])
def test_exact(changed: Callable[[Model, Tensor], Tensor], axes: dict[str, int]) -> None:
    model = Model(changed)
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=(X,), backend="eager")
    for module in (parallel, reference):
        module(X).backward()
    for ours, theirs in zip(parallel.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def of_another_region(model: Model, h: Tensor) -> Tensor:
    d = h.detach() * 1
    with torch.no_grad():
        d.transpose_(1, 2)
    return (h * d.mT).sum()


def test_what_would_be_lost_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"changes the shape of a value from outside.*\n  where: .*test_in_place_views.*\n.*without the underscore"
    ):
        autopar.compile(Model(of_another_region), autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
