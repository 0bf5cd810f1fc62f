"""A `torch.autograd.Function` keeps the backward that its author wrote, whatever its forward would be derived to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.graph.custom_functions import as_function, custom_function
from tests.support.models.layer import Layer, X, assert_as_model, of


class Rounded(torch.autograd.Function):
    """Straight through: the derivative of the forward itself is zero."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Scaled(torch.autograd.Function):
    """Two tensors and a number in, two tensors out; the gradient of the first is three times the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return x * y * scale, x.float().sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, other: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return gradient * y * ctx.scale * 3 + other.unsqueeze(-1).to(x.dtype), (gradient * x * ctx.scale).sum(0), None


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Numbered(torch.autograd.Function):
    """Makes tensors of numbers, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        weights = torch.ones(x.shape[-1], dtype=x.dtype)
        weights[-1] = 0.3
        return x * torch.tensor(0.7) * weights + torch.as_tensor([[0.1], [0.2]]).sum() + torch.asarray(0.2) + torch.tensor(data=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * torch.tensor([0.25, 0.125]).sum() + torch.tensor([]).sum()


class Indexed(torch.autograd.Function):
    """Writes numbers by indices of several kinds, and reads by lists of numbers, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[:, [1, 0, 2, 3]] * _written(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0] * _written(gradients[0]))[:, [1, 0, 2, 3]]


def _written(like: Tensor) -> Tensor:
    weights, rows = torch.ones(4, 4, dtype=like.dtype), torch.arange(2)
    weights[0] = 0.3
    weights[rows] = 0.7
    weights[rows, rows + 2] = 0.9
    weights[[2, 3]] = 0.1
    weights[[1, 2], [1, 2]] = 0.6
    return weights.cumsum(0)[[3, 1, 2, 0]]


class Model(nn.Module):
    """One custom function right after another, one with several operands and results, dropout in between."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Rounded.apply(Rounded.apply(self.first(x) * 3) * 0.5)
        hidden, total = Scaled.apply(hidden, self.weight, 2.0)  # type: ignore[misc]
        return (self.last(self.dropout(hidden)) ** 2).sum() + total.sum()


def test_gradients_are_those_of_the_written_backward() -> None:
    model = Layer(lambda self, x: (Rounded.apply(self.linear(x)) ** 2).sum())
    assert_as_model(model, (X,), {})


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_custom_functions_split_and_stay_exact(dropout: float) -> None:
    """With dropout the FORWARD program is the reference, and is promoted with what stands in the functions."""
    torch.manual_seed(0)
    model, x = Model(dropout), torch.randn(8, 8)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=(x,), backend="eager")
    for promote in (True, False):
        report = parallel.verify(x, promote=promote)
        assert report, str(report)
    assert set(report.gradient_errors) == {name for name, _ in model.named_parameters()}
    assert parallel.summary()["flops_split"] == 1.0


def test_a_function_is_known_by_what_it_was_made_from() -> None:
    program = of(lambda self, x: Rounded.apply(self.linear(x)).sum(), X)
    found = [custom_function(node.target) for node in program.graph.nodes if node.op == "call_function"]
    (function,) = [each for each in found if each is not None]
    assert custom_function(as_function(function)) is function
    assert torch.equal(function(torch.tensor([1.4, 1.6]))[0], torch.tensor([1.0, 2.0]))


def test_draws_inside_a_custom_function_are_refused() -> None:
    model = Layer(lambda self, x: Drawing.apply(self.linear(x)).sum())
    with pytest.raises(autopar.CaptureError, match=r"draws random numbers \(aten.rand_like.default\), which cannot be keyed"):
        autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")


def test_a_function_that_writes_into_its_input_is_refused() -> None:
    with pytest.raises(autopar.CaptureError) as refused:
        of(lambda self, x: Writing.apply(self.linear(x) + 0).sum(), X)
    what, where, mend = str(refused.value).splitlines()
    assert "a torch.autograd.Function writes in" in what and "write out of place" in mend
    assert where.startswith(f"  where: {__file__}:") and "Writing.apply(self.linear(x) + 0)" in where


@pytest.mark.parametrize("function", [Numbered, Indexed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_inside_a_custom_function_become_tensors_by_ops(dtype: torch.dtype, function: type[torch.autograd.Function]) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            found: Any = function.apply(self.inner(x))
            return found.square().mean()

    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=dtype)
    parallel = autopar.compile(Inner(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    assert parallel.verify(x) and parallel.verify(x, promote=True)
