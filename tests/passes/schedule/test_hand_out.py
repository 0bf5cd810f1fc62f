"""Results are on every rank that wants them, gradients where their parameters are, a gradient that nothing computes among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.instructions import Pause


class Sums(nn.Module):
    """Two outputs; the gradients of the parameters are their tangents."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.a, x + self.b


def test_a_gradient_that_is_its_tangent_comes_back_through_the_callers_own_loss() -> None:
    model, x = Sums(), torch.randn(8, 4)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    first, second = parallel(x)
    weight = torch.randn(8, 4)
    ((first * weight).sum() + 3 * second.sum()).backward()
    torch.testing.assert_close(model.a.grad, weight)
    torch.testing.assert_close(model.b.grad, torch.full((8, 4), 3.0))


class Shifted(nn.Module):
    """The last stage adds a number to the loss: its gradient is 1, which nothing computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + self.shift


@pytest.mark.parametrize("number", [1, 2])
def test_a_gradient_that_nothing_computes_is_with_the_stage_that_holds_its_parameter(number: int) -> None:
    model, x = Shifted(), torch.randn(8, 4)
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2), example_inputs=(x,), backend="eager", num_microbatches=number)
    for schedule in parallel.compiled.schedules:
        held = {item.name for item in schedule.signature.inputs_of("parameter")}
        assert {item.name for item in schedule.signature.outputs_of("gradient")} == held
    assert sum("shift" in {item.name for item in each.signature.inputs_of("parameter")} for each in parallel.compiled.schedules) == 1
    (2 * parallel(x)).backward()
    torch.testing.assert_close(model.shift.grad, torch.tensor(2.0))
    assert parallel.verify(x)


def test_every_rank_of_a_pipeline_hands_out_at_its_end_and_one_that_is_none_between_forward_and_backward() -> None:
    x = torch.randn(8, 4)
    for mesh, is_last in ((autopar.virtual_mesh(pp=2), True), (autopar.virtual_mesh(dp=2), False)):
        parallel = autopar.compile(Shifted(), mesh, example_inputs=(x,), backend="eager")
        for schedule in parallel.compiled.schedules:
            assert schedule.instructions.count(Pause()) == 1 and isinstance(schedule.instructions[-1], Pause) == is_last


class Overwritten(nn.Module):
    """What forward reads of `bias` it overwrites: its gradient is zeros, and an optimizer that decays weights moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        found = h.clone()
        found[0].copy_(self.bias)
        found[:] = h
        return found.square().mean()


@pytest.mark.parametrize("trains", [False, True])
def test_a_parameter_that_is_overwritten_is_there_to_be_updated(trains: bool) -> None:
    decayed: tuple[type[torch.optim.AdamW], dict[str, float]] = (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5})
    model, x = Overwritten(), torch.randn(4, 6)
    options: dict[str, Any] = {"optimizer": decayed, "train_step": autopar.TrainStep()} if trains else {}
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs={"x": x}, backend="eager", **options)
    if trains:
        parallel.train_step(x=x)
    else:
        optimizer = decayed[0](parallel.parameters(), **decayed[1])
        parallel(x=x).backward()
        optimizer.step()
    torch.testing.assert_close(model.bias.detach(), torch.full((4,), 0.95))
    assert parallel.verify(x=x)
