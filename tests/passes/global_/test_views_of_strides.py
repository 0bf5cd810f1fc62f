"""Ops that address memory as views, in text and in value; those that address a part of it stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.passes.global_.views_of_strides import ViewsOfStrides
from tests.support.graphs import assert_unchanged, ops, text, traced

aten = torch.ops.aten
X, FLAT = torch.randn(8, 4), torch.randn(32)


def rewritten(function: Callable[..., Any], *tensors: Tensor) -> list[str]:
    before = traced(function, *tensors)
    after = ViewsOfStrides().apply(before)
    assert_unchanged(before, after, *tensors)
    return text(after)


def test_all_of_a_tensor_in_order_is_a_view() -> None:
    assert rewritten(lambda x: aten.as_strided(x, [8, 1, 4], [4, 77, 1]), X) == [
        "view_default: aten.view.default(x_1, [8, 1, 4])",
        "→ view_default",
    ]
    assert rewritten(lambda x: aten.as_strided(x, [2, 16], [16, 1], 0), X)[0] == "view_default: aten.view.default(x_1, [2, 16])"


def test_what_is_overwritten_as_a_whole_is_what_was_written() -> None:
    assert rewritten(lambda x, y: aten.as_strided_scatter(x, y, [8, 4], [4, 1], 0), FLAT, X) == [
        "reshape_default: aten.reshape.default(y_1, [32])",
        "→ reshape_default",
    ]
    assert rewritten(lambda x, y: aten.copy(x, y) + 1, X, X + 1) == ["add: aten.add.Tensor(y_1, 1)", "→ add"]


def test_parts_transposes_and_casts_stay() -> None:
    for function in (
        lambda x: aten.as_strided(x, [4, 4], [4, 1]),
        lambda x: aten.as_strided(x, [4, 8], [1, 4]),
        lambda x: aten.as_strided(x, [7, 4], [4, 1], 4),
        lambda x: aten.as_strided(x.t(), [4, 8], [8, 1]),
        lambda x: aten.as_strided_scatter(x, x[:4], [4, 4], [4, 1]),
        lambda x: aten.copy(x, x[0]),
        lambda x: aten.copy(x, x.double()),
    ):
        before = traced(function, X)
        after = ViewsOfStrides().apply(before)
        assert ops(after) == ops(before)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool1d(self.first(x).transpose(1, 2), 1)
        return (torch.flatten(pooled, 1) @ self.last.weight.t()).square().mean()


def test_pooling_to_one_position_splits_with_what_follows() -> None:
    model, x = Pooled().double(), torch.randn(8, 5, 6).double()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=(x,), backend="eager")
    assert parallel.verify(x) and parallel.summary()["flops_split"] == 1.0
    assert not [entry for entry in parallel.summary()["replicated"] if "as_strided" in entry["op"]]
