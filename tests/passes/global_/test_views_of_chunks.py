"""Equal chunks become views, in text and in value; unequal ones stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.passes.global_.views_of_chunks import ViewsOfChunks
from tests.support.graphs import assert_unchanged, ops, text, traced

aten = torch.ops.aten
X = torch.randn(8, 12)


def rewritten(function: Callable[..., Any], *tensors: Tensor) -> list[str]:
    before = traced(function, *tensors)
    after = ViewsOfChunks().apply(before)
    assert_unchanged(before, after, *tensors)
    return text(after)


def test_split() -> None:
    assert rewritten(lambda x: aten.split.Tensor(x, 4, 1), X) == [
        "reshape_default: aten.reshape.default(x_1, [8, 3, 4])",
        "select_int: aten.select.int(reshape_default, 1, 0)",
        "select_int_1: aten.select.int(reshape_default, 1, 1)",
        "select_int_2: aten.select.int(reshape_default, 1, 2)",
        "→ select_int, select_int_1, select_int_2",
    ]


def test_a_part_that_nobody_reads_is_gone() -> None:
    assert rewritten(lambda x: aten.split.Tensor(x, 4, -1)[2], X) == [
        "reshape_default: aten.reshape.default(x_1, [8, 3, 4])",
        "select_int_2: aten.select.int(reshape_default, 1, 2)",
        "→ select_int_2",
    ]


def test_a_part_longer_than_all() -> None:
    assert "aten.split.Tensor" not in ops(ViewsOfChunks().apply(traced(lambda x: aten.split.Tensor(x, 64, 1)[0], X)))


def test_split_with_sizes() -> None:
    assert ops(ViewsOfChunks().apply(traced(lambda x: aten.split_with_sizes.default(x, [6, 6], 1), X))).count("aten.select.int") == 2
    unequal = rewritten(lambda x: aten.split_with_sizes.default(x, [8, 4], 1), X)
    assert unequal[0] == "split_with_sizes: aten.split_with_sizes.default(x_1, [8, 4], 1)"


@pytest.mark.parametrize(
    ("start", "end", "dim", "is_chunk"),
    [
        (4, 8, 1, True),
        (0, 6, 1, True),
        (6, 2**63 - 1, 1, True),
        (-4, 2**63 - 1, 1, True),
        (2, 6, 1, False),
        (0, 5, 1, False),
        (0, 4, 0, True),
        (0, 8, 0, False),
    ],
)
def test_slices(start: int, end: int, dim: int, is_chunk: bool) -> None:
    found = rewritten(lambda x: aten.slice.Tensor(x, dim, start, end), X)
    assert any("select" in line for line in found) == is_chunk, found


def test_a_slice_with_a_step_stays() -> None:
    assert any("slice" in line for line in rewritten(lambda x: aten.slice.Tensor(x, 1, 0, 12, 2), X))


@pytest.mark.parametrize(("start", "is_chunk"), [(4, True), (0, True), (2, False)])
def test_slice_backward(start: int, is_chunk: bool) -> None:
    found = rewritten(lambda x: aten.slice_backward.default(x, [8, 36], 1, 3 * start, 3 * start + 12, 1), X)
    assert any("select_backward" in line for line in found) == is_chunk, found


def test_cat() -> None:
    found = rewritten(lambda x, y: aten.cat.default([x, y, x], -1), X, torch.randn(8, 12))
    assert found == [
        "unsqueeze_default: aten.unsqueeze.default(x_1, 1)",
        "unsqueeze_default_1: aten.unsqueeze.default(y_1, 1)",
        "unsqueeze_default_2: aten.unsqueeze.default(x_1, 1)",
        "cat_default: aten.cat.default([unsqueeze_default, unsqueeze_default_1, unsqueeze_default_2], 1)",
        "view_default: aten.view.default(cat_default, [8, 36])",
        "→ view_default",
    ]


def test_cats_that_stay() -> None:
    ragged = rewritten(lambda x, y: aten.cat.default([x, y], 1), X, torch.randn(8, 4))
    assert any("cat" in line for line in ragged) and not any("unsqueeze" in line for line in ragged)
    stacked = rewritten(lambda x, y: aten.cat.default([x, y], 1), torch.randn(8, 1), torch.randn(8, 1))
    assert not any("unsqueeze" in line for line in stacked)


def test_an_operand_without_contiguous_memory() -> None:
    rewritten(lambda x: aten.split.Tensor(x.t(), 4, 0), X)
    rewritten(lambda x: aten.slice.Tensor(x.t(), 0, 4, 8), X)
    rewritten(lambda x, y: aten.cat.default([x.t(), y.t()], 1), X, torch.randn(8, 12))
    rewritten(lambda x: aten.slice_backward.default(x.t(), [12, 16], 1, 8, 16, 1), X)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_values_never_change(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=3))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    start, end = data.draw(st.integers(-7, 7)), data.draw(st.integers(-7, 9))
    size = data.draw(st.integers(1, 6))
    x = torch.randn(shape)

    def function(x: Tensor) -> list[Tensor]:
        doubled = aten.cat.default([x, x], dim)
        return [*aten.split.Tensor(x, size, dim), aten.slice.Tensor(doubled, dim, start, end), doubled]

    rewritten(function, x)


def test_a_concatenation_keeps_its_strides() -> None:
    """Images whose channels come last in memory: a convolution's result lies as its operand does."""
    image, weight = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last), torch.randn(8, 8, 1, 1)

    def function(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return aten.convolution.default(aten.cat.default([x, y], 1), weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    assert "aten.view.default" in " ".join(rewritten(function, image, image, weight))
