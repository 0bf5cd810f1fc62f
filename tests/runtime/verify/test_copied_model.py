"""A copy of a model has what its modules hold beside parameters, ties, and hooks that see the copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.graph.promote import promote_tensor
from autopar.runtime.verify.copied_model import copy_model


class Holding(nn.Module):
    """Holds one tensor in a list, a tuple within a dict, and an attribute; and what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.own, self.computed = torch.ones(2), self.inner.weight * 2
        self.listed: list[Any] = [self.own, self.inner.weight, torch.arange(2)]
        self.listed.append(self.listed)
        self.named = {"pair": (self.own, torch.ones(2, dtype=torch.float64), nn.Parameter(torch.ones(2), requires_grad=False))}


@pytest.mark.parametrize("promoted", [True, False])
def test_what_modules_hold_beside_parameters_is_copied_and_promoted(promoted: bool) -> None:
    model = Holding()
    dtype = torch.float64 if promoted else torch.float32
    copied = copy_model(model, {id(value): value.to(dtype) for value in model.parameters()}, promoted=promoted)
    assert copied.own is copied.listed[0] is copied.named["pair"][0] is not model.own, "one tensor stays one"
    assert copied.listed[1] is copied.inner.weight and copied.listed[3] is copied.listed
    assert copied.own.dtype is copied.inner.weight.dtype is copied.computed.dtype is copied.named["pair"][2].dtype is dtype
    assert copied.listed[2].dtype is torch.int64 and copied.listed[2] is not model.listed[2]
    assert copied.named["pair"][1] is not model.named["pair"][1], "float64 as it was, and no tensor of the original's"
    assert copied.computed.is_leaf and model.computed.grad_fn is not None
    torch.testing.assert_close(copied.computed, model.computed.to(dtype))


def test_hooks_that_hold_the_model_see_the_copy() -> None:
    model, found = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), list[str]()
    names, first = {module: name for name, module in model.named_modules()}, model[0].weight

    def named(module: nn.Module) -> str:
        return names[module]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        found.append(named(module))
        return output * model[0].bias.sum() + first.sum()

    for module in model:
        module.register_forward_hook(hook)
    copied = copy_model(model, {id(value): promote_tensor(value) for value in model.parameters()}, promoted=True)
    copied(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert found == ["0", "1"] and copied[0].weight.grad is not None and first.grad is None
    model(torch.ones(2, 4))
    assert found == ["0", "1"] * 2
