"""The user's own optimizer is given the placed parameters; one whose statistics would be those of a part is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.runtime.train.placed import check_places, placed_instance
from tests.support.models.trained import Lamb


def named(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(2, 2)) for name in names}


def test_placed_parameters_take_the_places_of_the_first() -> None:
    first, placed = named("a", "b", "c"), named("a", "c")
    optimizer = torch.optim.SGD([{"params": [first["c"], first["b"]]}, {"params": [first["a"]], "lr": 1.0}])
    assert placed_instance(optimizer, first, placed) is optimizer
    assert [[id(each) for each in group["params"]] for group in optimizer.param_groups] == [[id(placed["c"])], [id(placed["a"])]]
    assert optimizer.param_groups[1]["lr"] == 1.0


def test_parameters_that_stay_may_have_state() -> None:
    first = named("a")
    optimizer = torch.optim.AdamW(first.values())
    first["a"].grad = torch.ones(2, 2)
    optimizer.step()
    assert placed_instance(optimizer, first, first).state[first["a"]]
    with pytest.raises(AutoparError, match="has stepped before its parameters were placed"):
        placed_instance(optimizer, first, named("a"))


def test_state_that_no_step_has_changed_goes_with_the_parameters() -> None:
    first, placed = named("a", "b"), named("a")
    optimizer = torch.optim.Adagrad(first.values(), initial_accumulator_value=0.5)
    assert placed_instance(optimizer, first, placed).state.keys() == {placed["a"]}
    assert float(optimizer.state[placed["a"]]["sum"].min()) == 0.5
    placed["a"].grad = torch.ones(2, 2)
    optimizer.step()
    with pytest.raises(AutoparError, match="has stepped before its parameters were placed"):
        placed_instance(optimizer, placed, named("a"))


@pytest.mark.parametrize(
    ("make", "scope", "problem"),
    [
        (torch.optim.LBFGS, "model", "LBFGS joins all parameters into one vector"),
        (Lamb, "model", 'Lamb is not known to treat each parameter by itself, .*TrainStep\\(update_scope="parameter"\\)'),
        (Lamb, "parameter", ""),
        (torch.optim.AdamW, "element", ""),
    ],
)
def test_what_a_stage_cannot_know_is_refused(make: Any, scope: Any, problem: str) -> None:
    parameters = named("a")
    world: Any = SimpleNamespace(mesh=Mesh((("pp", 2), ("tp", 2))))
    if not problem:
        check_places(make(parameters.values()), scope, world)
        return
    with pytest.raises(AutoparError, match=problem):
        check_places(make(parameters.values()), scope, world)
