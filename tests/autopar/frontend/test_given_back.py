"""Ops that give an operand back as it was given: who reads that later reads what it was before them, and casts are ops of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean of squares": F.mse_loss,
    "mean of absolutes": F.l1_loss,
    "huber": F.huber_loss,
    "broadcast": lambda h, y: torch.broadcast_tensors(h, y)[0].sum(),
    "cast": lambda h, _: h.float().sum(),
    "cast as another": lambda h, y: h.type_as(y).sum(),
    "moved": lambda h, _: h.cpu().sum(),
    "in dims": lambda h, _: torch.atleast_2d(h).sum(),
    "dropped out of": lambda h, _: F.dropout(h, 0.5, training=False).sum(),
}


class Measured(nn.Module):
    """A metric under `no_grad`, and the loss behind it."""

    def __init__(self, metric: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.metric = nn.Linear(8, 8), metric

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        with torch.no_grad():
            metric = self.metric(h, y)
        return {"loss": (h - y).square().mean(), "metric": metric}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_under_no_grad_trains_on(name: str) -> None:
    torch.manual_seed(0)
    model, x, y = Measured(READS[name]), torch.randn(4, 8), torch.randn(4, 8)
    model(x, y)["loss"].backward()
    assert model.linear.weight.grad is not None
    wanted = model.linear.weight.grad.clone()
    model.zero_grad()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs={"x": x, "y": y}, backend="eager", outputs="all")
    parallel(x=x, y=y)["loss"].backward()
    torch.testing.assert_close(model.linear.weight.grad, wanted)
    assert parallel.verify(x=x, y=y)


class Precise(nn.Module):
    """What an autocast gave is cast, and read as it was, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.linear(x)
        exact = h.float()
        exact.mul_(10.0)
        return {"loss": (exact + h).square().mean(), "h": h, "next": h + 1, "moved": h.to(x.device), "like": h.type_as(x)}


def test_a_cast_of_what_an_autocast_gave_is_a_copy() -> None:
    torch.manual_seed(0)
    model, x = Precise(), torch.randn(4, 8)
    wanted = model(x)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs={"x": x}, backend="eager", outputs="all")
    found = parallel(x=x)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in wanted.items()}
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


class Widened(nn.Module):
    """A copy in another dtype, written into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        wide = h.double()
        wide.mul_(10.0)
        return (wide + h).square().mean()


@pytest.mark.parametrize("promote", [False, True])
def test_a_copy_by_a_cast_stays_one_when_promoted(promote: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    parallel = autopar.compile(Widened(), autopar.virtual_mesh(dp=2), example_inputs={"x": x}, backend="eager")
    assert parallel.verify(x=x, promote=promote)


class Shown(nn.Module):
    """Gives back a view that was made under `no_grad`: it says that it requires a gradient, and has none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        with torch.no_grad():
            shown = h.view(-1, 4)
        return {"loss": h.square().mean(), "shown": shown}


def test_a_view_made_under_no_grad_may_be_given_back() -> None:
    x = torch.randn(4, 8)
    parallel = autopar.compile(Shown(), autopar.virtual_mesh(dp=2), example_inputs={"x": x}, backend="eager", outputs="all")
    assert parallel.verify(x=x)
