"""Random models, compiled by the front door with random meshes and options, train as in plain torch: losses, outputs, gradients, updates
and buffers of several steps, among them validations and batches of other sizes.

A seed is a model (`tests/support/random_models/`), so is what fails: the message has its source and a command that runs it again, or other
seeds. Random plans of these models, which no search would choose, are `test_random_graphs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support.random_models.cases import random_case
from tests.support.random_models.generate import random_model
from tests.support.random_models.oracle import Tally, outcome_of
from tests.support.random_models.shrink import shrink, smaller_models
from tests.support.random_models.steps import Step, difference, differences, runs, take_steps

NUM_SEEDS = 30  # of a number
OF_EVERY_RUN = range(8)


def check(seeds: Sequence[int], backend: str = "eager") -> Tally:
    """None may be wrong. Most must be exact, for to refuse everything is no error either, and much of them split."""
    tally = Tally()
    for seed in seeds:
        case = random_case(seed, backend)
        outcome = outcome_of(case)
        assert outcome.kind != "wrong", f"{case}\n{outcome.detail}\nagain: {case.command}\nas small as can be: {case.command} --shrink"
        tally.add(case, outcome)
    assert tally.exact >= 0.7 and tally.split >= 0.4, str(tally)
    return tally


def test_some_models_train_as_in_plain_torch() -> None:
    check(OF_EVERY_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 9))
def test_many_models_train_as_in_plain_torch(number: int) -> None:
    """`pytest -s` prints what `docs/slow-suites.md` records."""
    print(f"\n{number}: {check(range(number * NUM_SEEDS, (number + 1) * NUM_SEEDS))}")


@pytest.mark.slow
def test_some_models_by_the_default_backend_train_as_in_plain_torch() -> None:
    """Inductor's name is that of the front door's own choice."""
    print(f"\n{check(range(8), backend='inductor')}")


def test_a_seed_is_the_same_model_everywhere() -> None:
    assert str(random_model(3)) == str(random_model(3)) != str(random_model(4))


def test_what_fails_is_made_smaller() -> None:
    model = next(model for model in map(random_model, range(100)) if "cumsum" in model.source and len(model.lines) > 6)
    found = shrink(model, smaller_models, lambda smaller: "cumsum" in smaller.source and runs(smaller, Step(1)))
    assert len(found.lines) <= 4 and found.inputs.keys() <= model.inputs.keys(), str(found)


def test_what_differs_is_told() -> None:
    model = random_model(3)
    wanted, got = (take_steps(model.module(), model, (Step(1), Step(2))) for _ in range(2))
    assert not differences(wanted, got, 1e-9)
    loss = got[1]["loss", ""]
    assert loss is not None
    loss += 1e-3
    (told,) = differences(wanted, got, 1e-9)
    assert told.startswith("step 1, loss: off by 0.001 of")
    assert difference(None, torch.zeros(2), 1e-9) is None
    assert difference(None, torch.ones(2), 1e-9) == "nothing in plain torch, numbers here"
