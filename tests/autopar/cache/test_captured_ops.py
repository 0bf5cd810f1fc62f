"""Whether a captured program makes the ops of the recorded run: Dynamo may have seen another model than the run did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cache.trace import traced
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from tests.support.models import language, vision, zoo


class Reading(nn.Module):
    """Dynamo, which takes a fake tensor for a plain one, reads another value than the run, by as many ops."""

    def __init__(self, dynamos: Callable[[Any], Tensor], runs: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.other, self.dynamos, self.runs = nn.Linear(8, 8), nn.Linear(8, 8), dynamos, runs

    def forward(self, x: Tensor) -> Tensor:
        read = self.dynamos if type(x).__name__ == "Tensor" else self.runs
        return (self.layer(x) * read(self)).sum() + self.other.bias.sum()


def number(value: float) -> Callable[[Any], Tensor]:
    return lambda model: torch.tensor([value] * 8)


def bias(name: str) -> Callable[[Any], Tensor]:
    return lambda model: model.get_submodule(name).bias


@pytest.mark.parametrize(
    "dynamos, runs, is_same",
    [
        (number(2.0), number(2.0), True),
        (number(3.0), number(2.0), False),
        (bias("layer"), bias("layer"), True),
        (bias("layer"), bias("other"), False),
    ],
)
def test_a_capture_reads_what_the_run_does(dynamos: Any, runs: Any, is_same: bool) -> None:
    model, x = Reading(dynamos, runs), (torch.ones(4, 8),)
    assert traced(model, x, {}).is_done_by(capture(model, x, {}, virtual_mesh(dp=2))) is is_same


class Asking(nn.Module):
    """Dynamo takes a fake tensor for a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return (x.sigmoid() if type(x).__name__ == "Tensor" else x.tanh()).sum()


def test_a_capture_that_took_another_branch_is_found() -> None:
    x = (torch.ones(4, 8),)
    assert not traced(Asking(), x, {}).is_done_by(capture(Asking(), x, {}, virtual_mesh(dp=2)))


@pytest.mark.parametrize("make", [zoo.bert, language.t5, language.mamba, vision.resnet])
def test_models_that_ask_much_of_torch_are_known(make: Callable[[], zoo.Case]) -> None:
    case = make()
    assert traced(case.model, (), case.batch).is_done_by(capture(case.model, (), case.batch, virtual_mesh(dp=2)))
