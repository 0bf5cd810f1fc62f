"""Training goes on where another mesh stopped: optimizer, averages, loss scale and counts as whole values by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import LossScale, TrainStep
from autopar.errors import AutoparError
from tests.support.checkpoints import share
from tests.support.models.trained import Lamb, Sm3, batch, small_gpt

OPTIONS = TrainStep(ema=0.9, accumulate=2, clip_grad_norm=0.5)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "sm3": Sm3,
    "lamb": Lamb,
}


def parallel_on(axes: Mapping[str, int], name: str, options: TrainStep = OPTIONS, real: bool = False) -> autopar.ParallelModule:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)) if real else autopar.virtual_mesh(**axes)
    example = share(batch(0), axes) if real else batch(0)
    return autopar.compile(
        small_gpt(), mesh, example_inputs=example, backend="eager", optimizer=OPTIMIZERS[name], train_step=options,
        cluster=autopar.Cluster.ideal(),
    )  # fmt: skip


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.full_state_dict().items()}


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys() and one
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_training_goes_on_on_another_mesh(name: str) -> None:
    first = parallel_on({"dp": 2, "tp": 2}, name)
    for step in range(4):
        first.train_step(**batch(step))
    state, weights = first.train_state_dict(), first.full_state_dict()
    assert state["num_calls"] == 4 and state["ema"].keys() == dict(first.named_parameters()).keys()
    second = parallel_on({"pp": 2}, name)
    second.load_state_dict(weights)
    second.load_train_state_dict(state)
    for step in range(4, 8):
        first.train_step(**batch(step))
        second.train_step(**batch(step))
    assert difference(parameters_of(first), parameters_of(second)) <= 1e-12
    assert difference(first.ema, second.ema) <= 1e-12
    assert first.train_state_dict()["num_calls"] == second.train_state_dict()["num_calls"] == 8


def test_what_was_saved_stays_as_it_was() -> None:
    parallel = parallel_on({"dp": 2}, "adamw", TrainStep(ema=0.9))
    parallel.train_step(**batch(0))
    state = parallel.train_state_dict()
    before = {name: value.clone() for name, value in state["ema"].items()}
    moments = state["optimizer"]["state"]["norm.weight"]["exp_avg"].clone()
    parallel.train_step(**batch(1))
    assert difference(before, state["ema"]) == 0 and torch.equal(moments, state["optimizer"]["state"]["norm.weight"]["exp_avg"])


def test_the_loss_scale_and_the_learning_rate_are_in_it() -> None:
    options = TrainStep(loss_scale=LossScale(initial=4.0, growth_interval=2))
    first, second = (parallel_on({"dp": 2}, "adamw", options) for _ in range(2))
    for step in range(3):
        first.train_step(**batch(step))
    first.optimizer.param_groups[0]["lr"] = 0.125
    second.load_train_state_dict(first.train_state_dict())
    assert second.loss_scale == 8.0 and second.optimizer.param_groups[0]["lr"] == 0.125
    first.train_step(**batch(3)), second.train_step(**batch(3))
    assert first.loss_scale == second.loss_scale == 16.0


def test_a_state_of_other_options_is_refused_and_changes_nothing() -> None:
    first = parallel_on({"dp": 2}, "adamw")
    first.train_step(**batch(0))
    with pytest.raises(AutoparError, match="1 of the 2 calls that make an update are done"):
        first.train_state_dict()
    first.train_step(**batch(1))
    second = parallel_on({"dp": 2}, "adamw", TrainStep(loss_scale=LossScale()))
    with pytest.raises(AutoparError, match=r"a loss scale is in the saved state not.*averages \(ema=\) are in the saved state alone"):
        second.load_train_state_dict(first.train_state_dict())
    assert not second.optimizer.state and second.ema == {}
    state = first.train_state_dict()
    state["optimizer"]["groups"][0]["params"].remove("norm.weight")
    with pytest.raises(AutoparError, match="'norm.weight' is in this optimizer's alone"):
        first.load_train_state_dict(state)


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    first, second = parallel_on({"dp": 2}, "adafactor", TrainStep()), parallel_on({"dp": 2}, "adamw", TrainStep())
    first.train_step(**batch(0))
    with pytest.raises(AutoparError, match="the saved state is one of Adafactor, and the optimizer here is AdamW"):
        second.load_train_state_dict(first.train_state_dict())
    assert not second.optimizer.state


def test_a_state_that_lacks_something_is_refused_and_changes_nothing() -> None:
    first, second = (parallel_on({"dp": 2}, "adamw") for _ in range(2))
    for step in range(2):
        first.train_step(**batch(step))
    state = first.train_state_dict()
    for name in state:
        with pytest.raises(AutoparError, match=f"the saved state of training lacks '{name}'"):
            second.load_train_state_dict({key: value for key, value in state.items() if key != name})
    assert not second.optimizer.state


def saves_and_loads(one: Mapping[str, int], other: Mapping[str, int], name: str, options: TrainStep) -> tuple[float, float]:
    """How far training that went on on another mesh of these ranks is from training that did not stop, in parameters and averages."""
    first = parallel_on(one, name, options, real=True)
    for step in range(2):
        first.train_step(**share(batch(step), one))
    state, weights = first.train_state_dict(), first.full_state_dict()
    second = parallel_on(other, name, options, real=True)
    second.load_state_dict(weights)
    second.load_train_state_dict(state)
    for step in range(2, 4):
        first.train_step(**share(batch(step), one))
        second.train_step(**share(batch(step), other))
    ended, also = first.train_state_dict(), second.train_state_dict()
    assert ended["optimizer"]["groups"] == also["optimizer"]["groups"]
    virtual = parallel_on({"dp": 2}, name, options)  # one process
    virtual.load_train_state_dict(ended)
    return difference(parameters_of(first), parameters_of(second)), difference(ended["ema"], also["ema"])


DP_TP, PP_DP, TP = {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"dp": 1, "tp": 4}


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (DP_TP, PP_DP, "adamw"),
        pytest.param(PP_DP, TP, "adafactor", marks=pytest.mark.slow),
        pytest.param(PP_DP, DP_TP, "adamw", marks=pytest.mark.slow),
        pytest.param(DP_TP, TP, "sm3", marks=pytest.mark.slow),
        pytest.param(DP_TP, TP, "lamb", marks=pytest.mark.slow),
    ],
)
def test_processes_go_on_on_another_mesh(gloo_ranks: Any, one: Mapping[str, int], other: Mapping[str, int], name: str) -> None:
    for found in gloo_ranks.run(saves_and_loads, one, other, name, TrainStep(ema=0.9)):
        assert max(found) <= 1e-12, found
