"""Ops that give an operand back as it was given: who reads that later reads what it was before them, and casts are ops of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.graph.differentiable import differentiable

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


GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda h: h.float(),
    "cast twice": lambda h: h.to(torch.float32).type_as(h),
    "cast in an autocast": torch.autocast("cpu", torch.bfloat16)(lambda h: h.float()),
    "cast and written into": lambda h: h.float().mul_(3.0),
    "dropped out of by nothing": lambda h: F.dropout(h, 0.0),
}


class Given(nn.Module):
    """Trains through what `no_grad` gave back."""

    def __init__(self, give: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(8, 8), give

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            given = self.give(h)
            apart = given * 2
        return (given * apart).mean()


def assert_trained_alike(model: nn.Module, x: Tensor) -> None:
    model(x).backward()
    wanted = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    parallel(x).backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert [each is None for each in found] == [each is None for each in wanted]
    torch.testing.assert_close([each for each in found if each is not None], [each for each in wanted if each is not None])
    assert parallel.verify(x)


@pytest.mark.parametrize("name", GIVEN)
def test_what_no_grad_gives_back_as_it_was_has_its_gradient(name: str) -> None:
    torch.manual_seed(0)
    assert_trained_alike(Given(GIVEN[name]), torch.randn(4, 8))


class Dropping(nn.Module):
    """In evaluation dropout gives its operand, which is then written into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.drop(h).mul_(3.0)
        return h.square().mean()


def test_dropout_in_evaluation_gives_its_operand() -> None:
    torch.manual_seed(0)
    assert_trained_alike(Dropping().eval(), torch.randn(4, 8))


class Within(nn.Module):
    """Regions of gradients and of an autocast within each other."""

    def __init__(self, is_cast_outside: bool) -> None:
        super().__init__()
        self.frozen, self.linear, self.weight = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.is_cast_outside = is_cast_outside

    def forward(self, x: Tensor) -> Tensor:
        regions = torch.autocast("cpu", enabled=False), torch.no_grad()
        outer, inner = regions if self.is_cast_outside else regions[::-1]
        with outer:
            with inner:
                target = self.frozen(x)
                with torch.enable_grad():
                    trained = self.linear(x)
                apart = trained * 2
            target = target + 1
        return (target * trained * apart * self.weight).mean()


@pytest.mark.parametrize("is_cast_outside", [True, False])
def test_no_grad_within_an_autocast_trains_nothing(is_cast_outside: bool) -> None:
    torch.manual_seed(0)
    assert_trained_alike(Within(is_cast_outside), torch.randn(4, 8))


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


class TimeFirst(nn.Module):
    """Attention of `[length, batch]`, as `nn.MultiheadAttention` has it: on fake tensors torch lays out what it gives otherwise than in a
    run, and finds nothing to do for `contiguous()`."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(x.transpose(0, 1)).unflatten(-1, (3, 32)).permute(2, 0, 1, 3).contiguous().view(3, 6, 32, 8)
        attended = F.scaled_dot_product_attention(*(each.transpose(0, 1).unflatten(0, (8, 4)) for each in projected))
        return attended.permute(2, 0, 1, 3).contiguous().view(48, 32).square().mean()


def test_what_attention_gives_is_made_contiguous() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6, 32)
    parallel = autopar.compile(TimeFirst(), autopar.virtual_mesh(dp=2), example_inputs={"x": x}, backend="eager")
    assert parallel.verify(x=x) and parallel.verify(x=x, promote=True)


class Cast(nn.Module):
    """Reads in float32, under `no_grad`, what an autocast gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.first(x)
        with torch.no_grad():
            read = h.float()
        return (read * self.last(x)).mean()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cast_of_what_an_autocast_gave_is_a_cast_on_meta_too(device: str) -> None:
    """There torch casts nothing, and `float()` seems to give its operand back, which trains."""
    parallel = autopar.compile(Cast().to(device), autopar.virtual_mesh(dp=1), example_inputs={"x": torch.randn(4, 8)}, backend="eager")
    program = parallel.compiled.forward
    trained = {node.name for node in differentiable(program)}
    (read,) = (
        node
        for node in program.graph.nodes
        if "to" in str(node.target) and node.meta["val"].shape == (4, 8) and node.meta["val"].dtype == torch.float32
    )
    assert read.all_input_nodes[0].meta["val"].dtype == torch.bfloat16 and read.name not in trained


class BehindLstm(nn.Module):
    """To a trace an LSTM gives float32 under an autocast, and `to(torch.bfloat16)` casts; in a run it gives back `h`, which trains."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                read = self.lstm(x)[0]
            h = self.linear(read) + read
            with torch.no_grad():
                same = h.to(torch.bfloat16)
        return h.float().square().mean() + same.float().square().mean()


def test_what_casts_nothing_in_a_run_trains_though_it_casts_in_a_trace() -> None:
    torch.manual_seed(0)
    model, x = BehindLstm(), torch.randn(4, 6, 8)
    model(x).backward()
    wanted = model.linear.weight.grad
    assert wanted is not None
    model.zero_grad()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs={"x": x}, backend="eager")
    parallel(x=x).backward()
    assert parallel.linear.weight.grad.sub(wanted).norm() < 0.02 * wanted.norm(), "half of it comes through what is given back"
