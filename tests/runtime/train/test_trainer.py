"""What a step does besides, and what it refuses."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, NonFiniteError, ValueCheckError
from tests.support.models.trained import Lamb, Layers, batch, small_gpt

DP2 = {"dp": 2}


class Line(nn.Module):
    """One matrix; the loss is as large as `x` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).square().mean()


def parallel_of(model: nn.Module, axes: dict[str, int] = DP2, x: Any = None, **options: Any) -> autopar.ParallelModule:
    example = (torch.randn(8, 4),) if x is None else x
    return autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=example, backend="eager", **options)


def test_without_an_optimizer_it_raises() -> None:
    for given in (None, "adamw"):
        parallel = parallel_of(Line(), optimizer=given)
        assert parallel.optimizer is None
        with pytest.raises(AutoparError, match="train_step without an optimizer: pass optimizer= to autopar.compile"):
            parallel.train_step(torch.randn(8, 4))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_a_backward_outside_are_refused_and_change_nothing(accumulate: int) -> None:
    model, x = Line(), torch.randn(8, 4)
    parallel = parallel_of(model, optimizer=(torch.optim.SGD, {"lr": 0.1}), train_step=autopar.TrainStep(accumulate=accumulate))
    parallel(x).backward()
    before = model.weight.detach().clone()
    with pytest.raises(AutoparError, match=r"'weight', one of 1, has a gradient already, of a backward outside train_step.*zero_grad"):
        parallel.train_step(x)
    assert torch.equal(model.weight, before)
    parallel.zero_grad(set_to_none=False)
    for _ in range(accumulate):
        parallel.train_step(x)
    wanted = before.clone().requires_grad_()
    (x @ wanted).square().mean().backward()
    assert wanted.grad is not None
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * wanted.grad)


def test_an_old_gradient_of_what_is_frozen_is_no_matter() -> None:
    model = Layers()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    first.requires_grad_(False)
    kept = first.detach().clone()

    def of_trained(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)

    parallel = parallel_of(nn.Sequential(*model.layers, Line()), optimizer=of_trained)
    assert parallel.train_step(torch.randn(8, 4)).isfinite() and torch.equal(first, kept)


def test_an_error_of_the_users_function_is_theirs() -> None:
    """Not that the model has no attribute `optimizer`, nor what it has there."""

    class Named(Line):
        optimizer = "the model's"

    def misspelt(parameters: Any) -> torch.optim.Optimizer:
        raise AttributeError("module 'torch.optim' has no attribute 'Nothing'")

    for model in (Line(), Named()):
        with pytest.raises(AttributeError, match="'torch.optim' has no attribute 'Nothing'"):
            _ = parallel_of(model, optimizer=misspelt).optimizer


def test_an_instance_is_the_users_own() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = parallel_of(model, optimizer=optimizer)
    assert parallel.optimizer is optimizer
    parallel.train_step(torch.ones(8, 4))
    assert (model.weight < 1).all()
    with pytest.raises(AutoparError, match=r"group 0 of the optimizer has a parameter of shape \[4, 4\] that is none of the model's"):
        parallel_of(Line(), optimizer=optimizer)


def test_a_loss_is_needed_and_something_to_update() -> None:
    class Outputs(Line):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    with pytest.raises(AutoparError, match="train_step needs a loss"):
        parallel_of(Outputs(), optimizer=torch.optim.SGD).train_step(torch.randn(8, 4))
    frozen = Line()
    frozen.weight.requires_grad_(False)
    with pytest.raises(AutoparError, match="train_step"):
        parallel_of(frozen, optimizer=partial(torch.optim.SGD, lr=0.1)).train_step(torch.randn(8, 4))


@pytest.mark.parametrize("where", ["parameter", "accumulated", "model"])
def test_hooks_that_wait_for_gradients_are_refused(where: str) -> None:
    model = Line()
    parallel = parallel_of(model, optimizer=torch.optim.SGD)
    if where == "model":
        model.register_full_backward_hook(lambda *_: None)
    elif where == "parameter":
        model.weight.register_hook(lambda gradient: gradient)
    else:
        model.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(AutoparError, match=r"hook on the (gradient of 'weight'|backward of the model), which train_step would not call"):
        parallel.train_step(torch.randn(8, 4))


def test_forward_hooks_run_and_the_output_is_the_calls() -> None:
    class Structured(Line):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(x), "twice": 2 * x}

    parallel, seen = parallel_of(Structured(), optimizer=torch.optim.SGD, outputs="all"), []
    parallel.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(8, 4)
    output = parallel.train_step(x)
    assert seen == [1] and not output["loss"].requires_grad
    torch.testing.assert_close(output["twice"], 2 * x)


@pytest.mark.parametrize("axes", [DP2, {"pp": 2}], ids=str)
def test_steps_that_are_not_finite_are_skipped_or_raise(axes: dict[str, int]) -> None:
    for non_finite in ("skip", "raise"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Line())
        parallel = parallel_of(model, axes, optimizer=torch.optim.AdamW, train_step=autopar.TrainStep(non_finite=non_finite))
        before = copy.deepcopy(model.state_dict())
        bad = torch.ones(8, 4)
        bad[5, 2] = torch.inf
        if non_finite == "raise":
            with pytest.raises(
                NonFiniteError,
                match=r"the loss is infinite or NaN and gradients are infinite or NaN: '0.weight'.* no parameter was updated on any rank",
            ):
                parallel.train_step(bad)
        else:
            parallel.train_step(bad)
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
        assert all(each.grad is None for each in model.parameters())
        parallel.train_step(torch.ones(8, 4))
        assert not torch.equal(model.get_parameter("0.weight"), before["0.weight"])


@pytest.mark.parametrize("axes", [DP2, {"pp": 2}], ids=str)
def test_where_a_check_of_the_model_fails_nothing_is_updated(axes: dict[str, int]) -> None:
    model = Layers()
    parallel = parallel_of(model, axes, optimizer=torch.optim.SGD)
    before = copy.deepcopy(model.state_dict())
    model.layers[3].bias.data.fill_(50.0)
    with pytest.raises(ValueCheckError):
        parallel.train_step(torch.randn(8, 4))
    model.layers[3].bias.data.copy_(before["layers.3.bias"])
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(each.grad is None for each in model.parameters())
    parallel.train_step(torch.randn(8, 4))
    assert not torch.equal(model.layers[0].weight, before["layers.0.weight"])


def test_hooks_of_the_optimizer_run_once_a_step() -> None:
    model, seen = small_gpt(), []
    parallel = parallel_of(model, {"tp": 2}, batch(0), optimizer=torch.optim.AdamW)
    assert parallel.optimizer is not None
    parallel.optimizer.register_step_pre_hook(lambda *_: seen.append(sum(each.grad is not None for each in model.parameters())))
    parallel.train_step(**batch(0))
    assert seen == [len(list(model.parameters()))]


def test_an_optimizer_of_an_unknown_kind_steps_once_with_all_gradients() -> None:
    sizes: list[int] = []

    class Counting(Lamb):
        def step(self, closure: None = None) -> None:
            sizes.append(sum(len(group["params"]) for group in self.param_groups))
            super().step()

    for options, number in ((autopar.TrainStep(), 1), (autopar.TrainStep(update_scope="parameter"), 2)):
        model = small_gpt()
        parallel = parallel_of(model, {"tp": 2}, batch(0), optimizer=Counting, train_step=options)
        sizes.clear()
        parallel.train_step(**batch(0))
        assert len(sizes) >= number and (len(sizes) == 1) == (number == 1) and sum(sizes) == len(list(model.parameters()))


def test_an_optimizer_that_asks_for_the_loss_again() -> None:
    model, x = Layers(), torch.randn(8, 4)
    reference = copy.deepcopy(model)
    parallel = parallel_of(model, {"dp": 2, "tp": 2}, optimizer=partial(torch.optim.LBFGS, max_iter=4))
    optimizer = torch.optim.LBFGS(reference.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = reference(x)
        loss.backward()
        return loss

    for _ in range(2):
        loss, wanted = parallel.train_step(x), optimizer.step(closure)
        torch.testing.assert_close(loss, wanted.detach())
        assert not loss.requires_grad
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_which_of_several_outputs_is_the_loss() -> None:
    class Outputs(Line):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(x), "logits": x @ self.weight, "inputs": 2 * x}

    for optimizer in (partial(torch.optim.LBFGS, max_iter=2), torch.optim.SGD):
        with pytest.raises(AutoparError, match='gradients come back through 2 outputs of this call: leave out outputs="all"'):
            parallel_of(Outputs(), optimizer=optimizer, outputs="all").train_step(torch.ones(8, 4))
        output = parallel_of(Outputs(), optimizer=optimizer).train_step(torch.ones(8, 4))
        assert not output["loss"].requires_grad


def test_a_copy_has_no_optimizer() -> None:
    parallel = parallel_of(Line(), optimizer=torch.optim.SGD)
    assert copy.deepcopy(parallel).optimizer is None
