"""Ops that address memory as views, in text and in value; those that address a part of it stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
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


def test_all_of_it_in_another_order_is_a_permutation() -> None:
    assert rewritten(lambda x: aten.as_strided(x, [4, 8], [1, 4]), X) == [
        "view_default: aten.view.default(x_1, [8, 4])",
        "permute_default: aten.permute.default(view_default, [1, 0])",
        "→ permute_default",
    ]
    assert rewritten(lambda x, y: aten.as_strided_scatter(x, y, [4, 8], [1, 4], 0), FLAT, X.t().contiguous())[:2] == [
        "permute_default: aten.permute.default(y_1, [1, 0])",
        "reshape_default: aten.reshape.default(permute_default, [32])",
    ]


def test_memory_is_addressed_where_it_lies_in_order() -> None:
    """Ranks that put a tensor together lay it out so, whatever it was a view of."""
    assert rewritten(lambda x: aten.as_strided(x.t(), [2, 4], [4, 1]), X)[1:3] == [
        "permute_default: aten.permute.default(t, [1, 0])",
        "as_strided_default: aten.as_strided.default(permute_default, [2, 4], [4, 1], 0)",
    ]
    assert rewritten(lambda x: aten.as_strided(x[2:, 1:], [2, 4], [4, 1]), X)[-2:] == [
        "as_strided_default: aten.as_strided.default(x_1, [2, 4], [4, 1], 9)",
        "→ as_strided_default",
    ]


def test_what_is_overwritten_as_a_whole_is_what_was_written() -> None:
    assert rewritten(lambda x, y: aten.as_strided_scatter(x, y, [8, 4], [4, 1], 0), FLAT, X) == [
        "reshape_default: aten.reshape.default(y_1, [32])",
        "→ reshape_default",
    ]
    assert rewritten(lambda x, y: aten.copy(x, y) + 1, X, X + 1) == ["add: aten.add.Tensor(y_1, 1)", "→ add"]


def test_parts_transposes_and_casts_stay() -> None:
    for function in (
        lambda x: aten.as_strided(x, [4, 4], [4, 1]),
        lambda x: aten.as_strided(x, [7, 4], [4, 1], 4),
        lambda x: aten.as_strided_scatter(x, x[:4], [4, 4], [4, 1]),
        lambda x: aten.copy(x, x[0]),
        lambda x: aten.copy(x, x.double()),
    ):
        before = traced(function, X)
        after = ViewsOfStrides().apply(before)
        assert ops(after) == ops(before)


def windows(x: Tensor, length: int) -> Tensor:
    """Of each row, one behind the other, as they overlap in memory."""
    return x.as_strided((x.shape[0], x.shape[1] - length + 1, length), (x.stride(0), x.stride(1), x.stride(1)))


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda h: h.transpose(1, 2).as_strided((8, 8, 6), (48, 1, 8)).cumsum(1),
    "transposed, and a new tensor": lambda h: (h.transpose(1, 2) + 1).as_strided((8, 6, 8), (48, 8, 1)).cumsum(1),
    "windows": lambda h: windows(h.flatten(1), 3).exp(),
    "windows of a part": lambda h: windows(h[:, :, 2], 3).exp(),
    "windows of a transposed part": lambda h: windows(h.transpose(1, 2)[:, 3], 2).exp(),
    "from the middle of a part": lambda h: h[1:, 2:].as_strided((3, 5), (48, 7), 50).exp(),
    "of a chunk": lambda h: h.flatten(1).chunk(2, 1)[1].as_strided((8, 3), (48, 8)).exp(),
    "of one of all": lambda h: h.unbind(1)[2].as_strided((8, 5), (48, 1)).exp(),
    "behind a part": lambda h: h[2:].as_strided((6, 8), (48, 1)).exp(),
}


class Strided(nn.Module):
    def __init__(self, strided: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.strided = nn.Linear(8, 8), strided

    def forward(self, x: Tensor) -> Tensor:
        return self.strided(self.linear(x) * 1).sin().sum()


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"tp": 4}], ids=["dp2 tp2", "pp2 dp2", "tp4"])
def test_what_lies_in_another_order_is_read_as_it_lies(name: str, axes: dict[str, int]) -> None:
    model, x = Strided(STRIDED[name]).double(), torch.randn(8, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=(x,), backend="eager")
    losses = [module(x) for module in (parallel, reference)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(parallel.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


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
