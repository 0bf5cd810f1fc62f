"""Hooks on gradients: those that forward registers, and those on parameters. They run, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import CaptureError, virtual_mesh

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two layers; `between` stands between them, and may register hooks."""

    def __init__(self, between: Callable[[Two, Tensor, Tensor], Tensor] = lambda model, x, hidden: hidden) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.between = between
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, x, self.up(x))).square().mean()


def doubled(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: gradient * 2)
    return hidden


def two_hooks(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    return doubled(model, x, doubled(model, x, hidden))


def where_it_requires_a_gradient(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    return doubled(model, x, hidden) if hidden.requires_grad else hidden


def after_another_reader(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    squashed = hidden.tanh()
    hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return hidden + squashed


def reads_a_tensor(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    weight = hidden.detach().abs()
    hidden.register_hook(lambda gradient: gradient * weight)
    return hidden


def by_the_norm_of_the_whole(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))
    return hidden


def of_a_part(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    left, right = hidden.chunk(2, -1)
    left.register_hook(lambda gradient: gradient * 3)
    return torch.cat([right * left, right], -1)


def that_changes_nothing(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: None)
    return hidden


class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def as_a_function(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    return Weighted.apply(hidden, hidden * 2)


# Before torch 2.13 Dynamo makes a hook a `torch.autograd.Function` of its own.
IS_FUNCTION = find_spec("torch._higher_order_ops.register_hook") is None
KEPT = (
    doubled, where_it_requires_a_gradient, after_another_reader, *[reads_a_tensor] * (not IS_FUNCTION), by_the_norm_of_the_whole, of_a_part,
    that_changes_nothing, as_a_function, *[two_hooks] * IS_FUNCTION,
)  # fmt: skip


@pytest.mark.parametrize("between", KEPT)
def test_a_hook_in_forward_is_kept(between: Callable[[Two, Tensor, Tensor], Tensor]) -> None:
    model = Two(between)
    wanted = torch.autograd.grad(model(X), list(model.parameters()))
    parallel = autopar.compile(model, virtual_mesh(dp=2, tp=2), example_inputs=(X,), backend="eager")
    parallel(X).backward()
    for parameter, gradient in zip(parallel.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    assert parallel.verify(X, promote=True)
    assert parallel.summary()["flops_split"] == 1.0


def written_later(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    return doubled(model, x, hidden).mul_(3)


def reads_what_reads_it(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    weight = hidden * 2
    hidden.register_hook(lambda gradient: gradient * weight)
    return hidden


def of_a_parameter(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    model.up.weight.register_hook(lambda gradient: gradient * 2)
    return hidden


def after_accumulation(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    model.up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return hidden


def keeps_gradients(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: model.seen.append(gradient))
    return hidden


def retained(model: Two, x: Tensor, hidden: Tensor) -> Tensor:
    if hidden.requires_grad:
        hidden.retain_grad()
    return hidden


REFUSED = {
    **({reads_a_tensor: "a hook on a gradient reads what forward computes"} if IS_FUNCTION else {two_hooks: "has another hook already"}),
    written_later: "is being modified inplace" if IS_FUNCTION else "is written in place",
    reads_what_reads_it: "a hook on a gradient reads what forward computes" if IS_FUNCTION else "is read by what its hook reads",
    of_a_parameter: r"a hook on a parameter or an input \('up.*weight'\)",
    after_accumulation: r"a hook on a parameter or an input \('up.*weight'\)",
    keeps_gradients: "side effect",
    retained: "register a hook on it",
}


@pytest.mark.parametrize("between", REFUSED)
def test_a_hook_that_would_be_lost_is_refused(between: Callable[[Two, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[between]):
        autopar.compile(Two(between), virtual_mesh(dp=2), example_inputs=(X,), backend="eager")


def test_backward_hooks_of_modules_are_refused() -> None:
    model = Two()
    model.up.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(CaptureError, match="register_hook on the value itself"):
        autopar.compile(model, virtual_mesh(dp=2), example_inputs=(X,), backend="eager")


def with_hooks(model: nn.Module, seen: list[str]) -> Any:
    """Double one weight's gradient; note where another's is accumulated."""
    weights = dict(model.named_parameters())
    handle = weights["up.weight"].register_hook(lambda gradient: gradient * 2)
    weights["down.weight"].register_post_accumulate_grad_hook(lambda parameter: seen.append(str(parameter.grad is not None)))
    return handle


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("first", ["hooks", "compile"])
def test_hooks_on_parameters_run(first: str, axes: dict[str, int]) -> None:
    model, seen = Two(), list[str]()
    wanted = torch.autograd.grad(model(X), list(model.parameters()))
    if first == "hooks":
        with_hooks(model, seen)
    parallel = autopar.compile(model, virtual_mesh(**axes), example_inputs=(X,), backend="eager")
    if first == "compile":
        with_hooks(parallel, seen)
    parallel(X).backward()
    torch.testing.assert_close(model.up.weight.grad, 2 * wanted[0])
    torch.testing.assert_close(model.down.weight.grad, wanted[2])
    assert seen == ["True"]


def hooks_on_real_ranks() -> tuple[float, float, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, seen = Two(), list[str]()
    reference = copy.deepcopy(model)
    reference(X).backward()
    assert reference.up.weight.grad is not None
    handle = with_hooks(model, seen)
    mine = X.chunk(2)[dist.get_rank() // 2]
    parallel = autopar.compile(model, mesh, example_inputs=(mine,), backend="eager")

    def ratio() -> float:
        parallel.zero_grad()
        parallel(mine).backward()
        gradient = model.up.weight.grad
        assert isinstance(gradient, DTensor) and reference.up.weight.grad is not None
        return float((gradient.full_tensor() / reference.up.weight.grad).mean())

    before = ratio()
    handle.remove()
    return before, ratio(), seen


def test_hooks_on_parameters_from_before_run_on_real_ranks(gloo_ranks: Any) -> None:
    for before, after, seen in gloo_ranks.run(hooks_on_real_ranks):
        assert before == pytest.approx(2.0, abs=1e-4) and after == pytest.approx(1.0, abs=1e-4)
        assert seen == ["True", "True"]
