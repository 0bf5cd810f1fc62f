"""`torch.autograd.Variable(...)` in forward is what it is in eager PyTorch: the same values, without the gradient of what they come of."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

import autopar

VARIABLE: Callable[..., Tensor] = Variable


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(8, 8), wrap

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h * self.wrap(h)).square().mean()


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda h: VARIABLE(h.data.new(8).fill_(2)),
        lambda h: VARIABLE(torch.ones(8), requires_grad=False) + VARIABLE(h, volatile=True),
        lambda h: torch.autograd.Variable(h, True) * 2,
    ],
)
def test_a_variable_is_detached(wrap: Callable[[Tensor], Tensor], mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Wrapped(wrap), torch.randn(8, 8)
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(**mesh), example_inputs=(x,), backend="eager")
    losses = [module(x) for module in (parallel, reference)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close([each.grad for each in model.parameters()], [each.grad for each in reference.parameters()])
