"""Gradients are held in the dtype that was asked for, summed in another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import MixedPrecision
from autopar.ir.instructions import Launch
from autopar.ir.program import Form
from tests.support.captures import compiled

F16, F32 = torch.float16, torch.float32


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).float().square().mean()


def squares() -> nn.Module:
    torch.manual_seed(0)
    return Squares()


@pytest.mark.parametrize(("reduce", "number"), [(F32, 2), (F16, 1)])
def test_the_cast_stands_behind_the_sum(reduce: torch.dtype, number: int) -> None:
    parallel = compiled(squares(), {"dp": 2}, (torch.randn(8, 8),), precision=MixedPrecision(F16, reduce, F16), cluster="8xH100")
    program = next(step.program for step in parallel.compiled.steps if step.name == "hold gradients")
    assert program.form is Form.GLOBAL
    for item, node in program.named_outputs():
        if item.kind == "gradient":
            casts, at = 0, node
            while at.target is torch.ops.aten._to_copy.default:
                casts, at = casts + 1, at.args[0]
            assert item.dtype == node.meta["val"].dtype == F16 and casts <= number
    (schedule,) = parallel.compiled.schedules
    sums = {
        schedule.type_of(each)[1]
        for step in schedule.instructions
        if isinstance(step, Launch)
        for each in step.sources
        if schedule.type_of(each)[0]
    }
    assert sums == {reduce}
    assert parallel.verify(torch.randn(8, 8), promote=True) and parallel.verify(torch.randn(8, 8))


def test_without_it_nothing_changes() -> None:
    parallel = compiled(squares(), {"dp": 2}, (torch.randn(8, 8),), precision="bf16")
    before, after = (
        next(step.program for step in parallel.compiled.steps if step.name == name) for name in ("trace joint", "hold gradients")
    )
    assert before is after


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05, "accumulate": 2}], ids=["plain", "clip"])
def test_a_step_is_that_of_gradients_in_float32_but_for_their_rounding(axes: dict[str, int], options: dict[str, float]) -> None:
    found, x = [], torch.randn(8, 8)
    for grad in (F16, F32):
        model = squares()
        parallel = compiled(
            model,
            axes,
            (x,),
            precision=MixedPrecision(F16, grad=grad),
            optimizer=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
            train_step=autopar.TrainStep(loss_scale=autopar.LossScale(initial=2.0**10), **options),
        )
        for number in range(6):
            parallel.train_step(x)
            held = {each.grad.dtype for each in model.parameters() if each.grad is not None}
            assert held == ({grad} if options and number % 2 == 0 else set())
        loss = parallel(x)
        loss.backward()
        assert {each.grad.dtype for each in model.parameters() if each.grad is not None} == {
            F32
        }  # torch's own loop, whose optimizers want that
        found.append([each.detach() for each in model.parameters()])
    initial = list(squares().parameters())
    for low, high, first in zip(*found, initial, strict=True):
        assert float((low - high).norm()) < 2e-3 * float((high - first.detach()).norm())
