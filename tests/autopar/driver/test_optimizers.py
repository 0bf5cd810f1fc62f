"""An optimizer may be given in many ways; what it depends on is known by its class."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autopar.driver.optimizers import OptimizerRecipe, scope_of, takes_closure, updates_of
from autopar.driver.train_step import TrainStep
from autopar.errors import AutoparError
from tests.support.models.trained import Lamb


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    "given",
    [
        torch.optim.AdamW,
        partial(torch.optim.AdamW, lr=0.1),
        (torch.optim.AdamW, {"lr": 0.1}),
        lambda of: torch.optim.AdamW([{"params": [each for each in of if each.ndim > 1], "lr": 0.1}]),
    ],
)
def test_ways_to_give_one(given: Any) -> None:
    recipe, mine = OptimizerRecipe.of(given), parameters()
    assert recipe is not None and recipe.make is not None and recipe.instance is None
    made = recipe.make(mine)
    assert isinstance(made, torch.optim.AdamW) and made.param_groups[0]["params"][0] is mine[0]
    assert made.param_groups[0]["lr"] == (1e-3 if given is torch.optim.AdamW else 0.1)
    assert recipe.scope == "element" and isinstance(recipe.sample, torch.optim.AdamW)


def test_an_instance_is_itself_and_a_name_makes_none() -> None:
    instance = torch.optim.SGD(parameters())
    recipe = OptimizerRecipe.of(instance)
    assert recipe is not None and recipe.instance is instance
    assert OptimizerRecipe.of("adamw") is None and OptimizerRecipe.of(None) is None


def test_a_function_that_no_sample_can_be_made_of_depends_on_all() -> None:
    def by_number(of: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [of[0]]}, {"params": [of[1]]}])

    held = parameters()
    recipe, elsewhere = OptimizerRecipe.of(by_number), OptimizerRecipe.of(lambda of: torch.optim.SGD(held))
    assert recipe is not None and recipe.sample is None and recipe.scope == "model"
    assert elsewhere is not None and elsewhere.sample is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (3, "optimizer=3 is none: pass a torch.optim.Optimizer, its class"),
        (lambda of: "adam", "made a str; it must return a torch.optim.Optimizer"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients alone"),
    ],
)
def test_what_is_no_optimizer_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(AutoparError, match=problem):
        OptimizerRecipe.of(given)


def test_what_an_update_depends_on() -> None:
    of = parameters()
    assert scope_of(torch.optim.NAdam(of)) == "element" and scope_of(torch.optim.Adafactor(of)) == "parameter"
    assert scope_of(torch.optim.Muon(of[:1])) == "parameter" and scope_of(Lamb(of)) == "model"

    class Changed(torch.optim.SGD):
        """Whatever it does."""

    assert scope_of(Changed(of)) == "model"
    assert takes_closure(torch.optim.LBFGS(of)) and not takes_closure(torch.optim.SGD(of))


@pytest.mark.parametrize(
    ("given", "options", "when"),
    [
        (torch.optim.AdamW, TrainStep(), "bucket"),
        (torch.optim.AdamW, TrainStep(clip_grad_norm=1.0), "end"),
        (torch.optim.Adafactor, TrainStep(accumulate=2, ema=0.9), "bucket"),
        (Lamb, TrainStep(), "end"),
        (Lamb, TrainStep(update_scope="parameter"), "bucket"),
        (torch.optim.LBFGS, TrainStep(), None),
        ("adamw", TrainStep(), None),
    ],
)
def test_when_a_step_updates(given: Any, options: TrainStep, when: str | None) -> None:
    assert updates_of(OptimizerRecipe.of(given), options) == when
