"""What functions of a copied model hold is the copy's, wherever they hold it, and what is no part of the model stays the same object."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.verify.copied_model import copy_model


def with_hook(hook_of: Callable[[nn.Sequential], Any]) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(hook_of(model))
    return model


def copied(model: nn.Module) -> nn.Module:
    return copy_model(model, {id(value): value for value in model.parameters()}, promoted=False)


def of_default(model: nn.Sequential) -> Any:
    return lambda module, args, output, model=model: output * model[0].bias.sum()


def of_keyword(model: nn.Sequential) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor, *, model: nn.Sequential = model) -> Tensor:
        return output * model[0].bias.sum()

    return hook


def of_method(model: nn.Sequential) -> Any:
    first = model[0].forward
    return lambda module, args, output: output + first(torch.ones(2, 4))


def of_partial(model: nn.Sequential) -> Any:
    scaled = partial(lambda model, output: output * model[0].bias.sum(), model)
    return lambda module, args, output: scaled(output)


def partial_of_closure(model: nn.Sequential) -> Any:
    return partial(lambda number, module, args, output: output * model[number].bias.sum(), 0)


def of_reference(model: nn.Sequential) -> Any:
    found: Any = weakref.ref(model)
    return lambda module, args, output: output * found()[0].bias.sum()


def of_functions_in_a_dict(model: nn.Sequential) -> Any:
    table = OrderedDict(scale=lambda output: output * model[0].bias.sum())
    return lambda module, args, output: table["scale"](output)


def of_lists_in_a_dict(model: nn.Sequential) -> Any:
    table = {"layers": [model[0]]}
    return lambda module, args, output: output * table["layers"][0].bias.sum()


def of_its_own_attribute(model: nn.Sequential) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * vars(hook)["layers"][0].bias.sum()

    vars(hook)["layers"] = model
    return hook


HOOKS = (
    of_default,
    of_keyword,
    of_method,
    of_partial,
    partial_of_closure,
    of_reference,
    of_functions_in_a_dict,
    of_lists_in_a_dict,
    of_its_own_attribute,
)


@pytest.mark.parametrize("hook_of", HOOKS)
def test_what_a_hook_holds_is_the_copys(hook_of: Callable[[nn.Sequential], Any]) -> None:
    model = with_hook(hook_of)
    one = copied(model)
    for run, other in ((one, model), (model, one)):
        run(torch.ones(2, 4)).sum().backward()
        assert all(each.grad is not None for each in run.parameters()) and all(each.grad is None for each in other.parameters())
        run.zero_grad()


def test_a_forward_put_in_its_place_calls_the_copys() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    plain = model.forward
    model.forward = lambda x: 2 * plain(x)
    copied(model)(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is None


def test_functions_share_what_they_shared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sums: dict[nn.Module, Any] = dict.fromkeys(model, 0)
    seen: list[str] = []

    def kept(sums: dict[nn.Module, Any]) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            sums[module] = output.sum()
            seen.append("kept")

        return hook

    def added(sums: dict[nn.Module, Any]) -> Any:
        return lambda module, args, output: output * 0 + sums[model[0]]

    model[0].register_forward_hook(kept(sums))
    model[1].register_forward_hook(added(sums))
    assert copied(model)(torch.ones(2, 4)).abs().sum() > 0
    assert seen == ["kept"] and list(sums.values()) == [0, 0]
