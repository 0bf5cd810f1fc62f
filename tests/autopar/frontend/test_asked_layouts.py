"""Forward asks how an input lies: of one that lies otherwise than row by row it is refused, unless it is copied first."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.support.models.layer import Layer

Asking = Callable[[Tensor, nn.Module], Tensor]


class Asks(nn.Module):
    def __init__(self, ask: Asking) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(8, 8), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(x, self.linear).square().mean()


def by_layout(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x) if x.is_contiguous() else 2 * linear(x)


def by_layout_of_a_view(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x) * x.unsqueeze(0).stride(1)


def addressed(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x) + torch.as_strided(x, (4, 8), (1, 4))


def written_in_a_row(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    y.reshape(-1)[::3] = 0
    return linear(y)


def written_turned(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    turned = y.t().contiguous()
    turned[0] = 0
    return linear(y + turned.t())


def copied(x: Tensor, linear: nn.Module) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    return linear(x)


def addressed_once_copied(x: Tensor, linear: nn.Module) -> Tensor:
    x = x.contiguous()
    return linear(x) + x.as_strided((4, 8), (1, 4)) * x.stride(0)


def not_of_inputs(x: Tensor, linear: nn.Module) -> Tensor:
    y = linear(x)
    return y if y.is_contiguous() else 2 * y


def check(ask: Asking, *batches: Tensor) -> None:
    torch.manual_seed(0)
    model = Asks(ask)
    plain, parallel = copy.deepcopy(model), autopar.compile(model, autopar.virtual_mesh(dp=2), backend="eager")
    for x in batches:
        torch.testing.assert_close(parallel(x), plain(x))


@pytest.mark.parametrize("ask", [by_layout, by_layout_of_a_view, addressed, written_in_a_row, written_turned])
def test_what_lies_otherwise_is_refused(ask: Asking) -> None:
    for x in (torch.randn(8, 4).t(), torch.randn(4, 16)[:, ::2]):
        check(ask, torch.randn(4, 8))
        with pytest.raises(autopar.InputError, match=r"how 'args\[0\]' lies in memory.*\n  where: .*test_asked_layouts.py:\d+"):
            check(ask, x)
        with pytest.raises(autopar.InputError, match="lies in memory"):
            check(ask, torch.randn(4, 8), x)


def written_before_it_is_turned(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x).reshape(-1)
    y[::3] = 0
    return linear(y.view(4, 8).relu_().t().contiguous().mul_(2).t())


def written_in_parts(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    y.reshape(4, 2, 4)[:, 0] = 0
    return linear(y)


@pytest.mark.parametrize("ask", [copied, addressed_once_copied, not_of_inputs, written_before_it_is_turned, written_in_parts])
def test_where_it_makes_no_difference_any_layout_is_taken(ask: Asking) -> None:
    check(ask, torch.randn(4, 8), torch.randn(8, 4).t(), torch.randn(4, 16)[:, ::2])
    check(ask, torch.randn(8, 4).t(), torch.randn(4, 8))


def test_a_number_is_reshaped_beside_writes() -> None:
    x = torch.randn(8, 4)
    model = Layer(lambda self, x: self.linear(x).add_(1).square().mean() + x.sum().reshape(1).flatten().mean())
    assert autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager").verify(x)
