"""What users compute with parameters and gradients that are split: right, or refused, and never one rank's part in place of the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError, ModelError

WAYS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "dp": ((4,), ("dp",), {}),
    "zero": ((4,), ("dp",), {"zero": 3}),
    "tp": ((2, 2), ("dp", "tp"), {"pins": {"a.weight": ("tp", None)}}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 4, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(self.a(x).relu()), y)


def built(way: str) -> tuple[nn.Module, autopar.ParallelModule, list[Tensor], list[Tensor]]:
    """A model, the same parallel, the batch and this rank's share of it."""
    sizes, axes, options = WAYS[way]
    torch.manual_seed(0)
    model, batch = Net(), [torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    place = mesh.get_local_rank("dp")
    share = [each.chunk(sizes[0])[place] for each in batch]
    return model, autopar.compile(copy.deepcopy(model), mesh, example_inputs=share, backend="eager", **options), batch, share


def error_of(compute: Any) -> str:
    try:
        compute()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def penalised(way: str) -> float:
    """How far a gradient is off where a penalty on parameters is added to the loss."""
    model, parallel, batch, share = built(way)
    for module, given in ((model, batch), (parallel, share)):
        loss: Tensor = module(*given) + 0.1 * sum((each.pow(2).sum() for each in module.parameters()), torch.zeros(()))
        loss.backward()
    gaps = []
    for wanted, found in zip(model.parameters(), parallel.parameters(), strict=True):
        assert wanted.grad is not None and found.grad is not None
        gaps.append((found.grad.full_tensor() - wanted.grad).abs().max().item())
    return max(gaps)


@pytest.mark.parametrize("way", WAYS)
def test_a_penalty_on_parameters_may_be_added_to_the_loss(gloo_ranks: Any, way: str) -> None:
    assert max(gloo_ranks.run(penalised, way)) < 1e-12


def numbers(way: str) -> dict[str, Any]:
    """What is said of numbers that a rank holds a part of, and the whole."""
    model, parallel, batch, share = built(way)
    model(*batch).backward()
    parallel(*share).backward()
    weight, wanted = parallel.get_parameter("a.weight"), model.get_parameter("a.weight")
    assert weight.grad is not None and wanted.grad is not None
    gradient, held = weight.grad, weight.detach()
    parts = [lambda: gradient.norm().item(), lambda: float(held.abs().max()), lambda: int(torch.count_nonzero(held))]
    everything: list[Any] = [torch.nn.utils.get_total_norm([each.grad for each in of.parameters() if each.grad is not None])
                             for of in (parallel, model)]  # fmt: skip
    return {
        "refused": [error_of(each) for each in parts],
        "whole": abs(gradient.norm().full_tensor().item() - wanted.grad.norm().item()),
        "all": abs(everything[0].full_tensor().item() - everything[1].item()),
    }


@pytest.mark.parametrize("way", ["zero", "tp"])
def test_a_number_of_which_ranks_hold_parts_is_refused_and_the_whole_is_right(gloo_ranks: Any, way: str) -> None:
    for found in gloo_ranks.run(numbers, way):
        assert all("Call .full_tensor().item(), on every rank" in text for text in found["refused"]), found
        assert found["whole"] < 1e-12 and found["all"] < 1e-12


def test_what_every_rank_holds_whole_is_a_number(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(numbers, "dp"):
        assert not any(found["refused"]) and found["whole"] < 1e-12


def branches(way: str) -> tuple[list[bool], list[bool], str]:
    """Bools of what one element decides, which one rank holds; and what is said where ranks ask in other lines."""
    model, parallel, batch, share = built(way)
    model(*batch).backward()
    parallel(*share).backward()
    answers = []
    for module in (parallel, model):
        weight = module.get_parameter("a.weight")
        gradient = weight.grad
        assert gradient is not None
        asked = [bool(torch.isfinite(gradient).all()), bool(torch.isnan(weight).any()), bool((weight > weight.max() - 1e-9).any())]
        with torch.no_grad():
            weight.copy_(torch.where(weight >= weight.max(), float("nan"), weight))
            gradient.copy_(torch.where(gradient >= gradient.max(), float("inf"), gradient))
        asked += [bool(torch.isfinite(gradient).all()), bool(torch.isnan(weight).any()), torch.isnan(weight).all().item()]
        asked += [True] if torch.isnan(weight).any() else [False]
        asked += [bool(torch.isnan(weight).any(0).any()), bool((torch.isnan(weight) | (gradient == 0)).max())]
        answers.append(asked)
    weight = parallel.get_parameter("a.weight")
    if torch.distributed.get_rank() % 2:
        refused = error_of(lambda: bool((weight > 0).max()))
    else:
        refused = error_of(lambda: bool((weight > 0).max()))
    return answers[0], answers[1], refused


@pytest.mark.parametrize("way", WAYS)
def test_a_bool_of_what_is_split_is_that_of_all_ranks(gloo_ranks: Any, way: str) -> None:
    for found, wanted, refused in gloo_ranks.run(branches, way):
        assert found == wanted == [True, False, True, False, True, False, True, True, True]
        assert ("all must ask in the same line" in refused) == (way != "dp"), refused


class OfTwo(nn.Module):
    """One of two losses of the same network."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y)


def shared() -> str:
    inner, mesh = Net(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    one, other = (autopar.compile(OfTwo(inner), mesh, backend="eager") for _ in range(2))
    share = [torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)]
    one(*share)
    return error_of(lambda: other(*share))


def test_two_modules_of_one_network_are_told_apart(gloo_ranks: Any) -> None:
    for text in gloo_ranks.run(shared):
        assert text.startswith(ModelError.__name__) and "'inner.a.weight'" in text and "Two losses of the same networks" in text
