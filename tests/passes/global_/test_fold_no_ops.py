"""What changes nothing disappears; what changes anything stays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.passes.global_.fold_no_ops import FoldNoOps
from tests.support.graphs import assert_unchanged, ops, text, traced

aten = torch.ops.aten
X = torch.randn(4, 6)


def folded(function: Callable[..., Any], *tensors: Tensor) -> list[str]:
    before = traced(function, *tensors)
    after = FoldNoOps().apply(before)
    assert_unchanged(before, after, *tensors)
    return ops(after)


NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": aten.detach.default,
    "alias": aten.alias.default,
    "clone": aten.clone.default,
    "copy into empty": lambda x: aten.copy.default(aten.new_empty.default(x, [4, 6]), x),
    "copy to the same type": lambda x: aten._to_copy.default(x, dtype=torch.float32),
    "expand to itself": lambda x: aten.expand.default(x, [4, 6]),
    "view as itself": lambda x: aten.view.default(x, [4, 6]),
    "transposed twice": lambda x: aten.t.default(aten.t.default(x)),
    "turned round": lambda x: aten.permute.default(aten.transpose.int(x, -1, 0), [1, 0]),
    "no dim moved": lambda x: aten.permute.default(x, [0, -1]),
    "whole slice": lambda x: aten.slice.Tensor(x, 1, 0, 2**63 - 1),
    "cat of one": lambda x: aten.cat.default([x], -1),
    "cat of one that is transposed twice": lambda x: aten.cat.default([aten.t.default(aten.t.default(x))]),
    "+ −0": lambda x: aten.add.Tensor(x, -0.0),
    "− integer 0": lambda x: aten.sub.Tensor(x, 0),
    "× true": lambda x: aten.mul.Tensor(x, True),
    "− 0": lambda x: aten.sub.Tensor(x, 0.0),
    "× 1": lambda x: aten.mul.Tensor(x, 1.0),
    "÷ 1": lambda x: aten.div.Tensor(x, 1),
}

SOMETHING: dict[str, Callable[[Tensor], Tensor]] = {
    "another type": lambda x: aten._to_copy.default(x, dtype=torch.float64),
    "copy into another type": lambda x: aten.copy.default(aten.new_empty.default(x, [4, 6], dtype=torch.float64), x),
    "copy over more rows": lambda x: aten.copy.default(aten.new_empty.default(x, [2, 4, 6]), x),
    "another shape": lambda x: aten.view.default(x, [6, 4]),
    "transposed": aten.t.default,
    "another memory order": lambda x: aten.clone.default(aten.t.default(x), memory_format=torch.contiguous_format),
    "cat of two": lambda x: aten.cat.default([x, x]),
    "part of it": lambda x: aten.slice.Tensor(x, 1, 0, 5),
    "+ 0": lambda x: aten.add.Tensor(x, 0),
    "− −0": lambda x: aten.sub.Tensor(x, -0.0),
    "+ 0, none of it": lambda x: aten.add.Tensor(x, -0.0, alpha=-1),
    "+ 1": lambda x: aten.add.Tensor(x, 1),
    "× 2": lambda x: aten.mul.Tensor(x, 2.0),
    "÷ 1 rounded": lambda x: aten.div.Tensor_mode(x, 1, rounding_mode="floor"),
    "0 − x": lambda x: aten.rsub.Scalar(x, 0),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_changes_nothing(name: str) -> None:
    assert folded(lambda x: aten.relu.default(NOTHING[name](x)), X) == ["aten.relu.default"]
    chained = folded(lambda x: aten.relu.default(NOTHING[name](NOTHING[name](x))), X)
    assert chained == ["aten.relu.default"]


@pytest.mark.parametrize("name", SOMETHING)
def test_what_changes_something(name: str) -> None:
    before = traced(lambda x: aten.relu.default(SOMETHING[name](x)), X)
    assert folded(lambda x: aten.relu.default(SOMETHING[name](x)), X) == ops(before)


@pytest.mark.parametrize("lying", [aten.t.default, lambda x: aten.expand.default(aten.select.int(x, 0, 0), [4, 6])])
def test_a_cat_of_one_that_lies_otherwise_is_a_copy(lying: Callable[[Tensor], Tensor]) -> None:
    left = folded(lambda x: aten.relu.default(aten.cat.default([lying(x)])), X)
    assert left[-2:] == ["aten.clone.default", "aten.relu.default"]


# By how a sum is read: the ops that are left, but for the relu that reads it.
SUMS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "a bias": (lambda x: aten.view.default(aten.sum.dim_IntList(x, [0], True), [6]), ["aten.sum.dim_IntList"]),
    "the last dim": (lambda x: aten.reshape.default(aten.sum.dim_IntList(x, [-1], True), [4]), ["aten.sum.dim_IntList"]),
    "all dims": (lambda x: aten.view.default(aten.sum.dim_IntList(x, [0, 1], True), []), ["aten.sum.dim_IntList"]),
    "in another type": (
        lambda x: aten.view.default(aten.sum.dim_IntList(x, [0], True, dtype=torch.float64), [6]),
        ["aten.sum.dim_IntList"],
    ),
    "another shape": (
        lambda x: aten.view.default(aten.sum.dim_IntList(x, [0], True), [2, 3]),
        ["aten.sum.dim_IntList", "aten.view.default"],
    ),
    "without the dim": (
        lambda x: aten.view.default(aten.sum.dim_IntList(x, [0]), [1, 6]),
        ["aten.sum.dim_IntList", "aten.view.default"],
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_which_a_view_takes_the_dim_away(name: str) -> None:
    read, left = SUMS[name]
    assert folded(lambda x: aten.relu.default(read(x)), X) == [*left, "aten.relu.default"]


def test_a_sum_that_is_read_with_its_dim_keeps_it() -> None:
    def read(x: Tensor) -> Tensor:
        kept = aten.sum.dim_IntList(x, [0], True)
        return aten.add.Tensor(aten.view.default(kept, [6]), kept)

    assert folded(read, X) == ["aten.sum.dim_IntList", "aten.view.default", "aten.add.Tensor"]


def test_zeros_keep_their_sign() -> None:
    """Folded or not, what 1 / x shows; of integers there is one zero."""
    zeros = torch.tensor([0.0, -0.0, 1.0])

    def shown(op: Callable[..., Tensor], literal: float) -> Callable[[Tensor], Tensor]:
        return lambda x: aten.reciprocal.default(op(x, literal))

    for literal, op in itertools.product((0, 0.0, -0.0), (aten.add.Tensor, aten.sub.Tensor)):
        before = traced(shown(op, literal), zeros)
        assert_unchanged(before, FoldNoOps().apply(before), zeros)
    assert folded(lambda x: aten.neg.default(aten.add.Tensor(x, 0)), torch.arange(6)) == ["aten.neg.default"]


def test_complex_numbers_times_one_stay() -> None:
    """∞ · 0 is no number."""
    infinite = torch.tensor([complex(math.inf, 0.0), complex(1.0, -0.0)])
    before = traced(lambda x: torch.view_as_real(aten.mul.Tensor(x, 1)), infinite)
    assert ops(FoldNoOps().apply(before)).count("aten.mul.Tensor") == 1


def test_integers_divided_by_one_become_floats() -> None:
    assert folded(lambda x: aten.div.Tensor(x, 1), torch.arange(6)) == ["aten.div.Tensor"]


def test_a_factor_of_one_that_is_a_tensor_stays() -> None:
    assert folded(lambda x, y: aten.mul.Tensor(x, y), X, torch.ones(())) == ["aten.mul.Tensor"]


def test_indexing_by_full_ranges_is_a_view() -> None:
    def mask(x: Tensor) -> Tensor:
        rows = aten.view.default(torch.arange(4), [4, 1, 1, 1])
        columns = aten.view.default(torch.arange(6), [1, 1, 1, 6])
        return aten.index.Tensor(x, [rows, columns])

    before = traced(mask, X)
    after = FoldNoOps().apply(before)
    assert_unchanged(before, after, X)
    (line, result) = text(after)
    assert "[4, 1, 1, 6]" in line and "index" not in line and result.startswith("→"), text(after)


INDICES: dict[str, Callable[[], list[Tensor]]] = {
    "shifted": lambda: [torch.arange(4) + 1 - 1],
    "half": lambda: [torch.arange(2)],
    "backwards": lambda: [torch.arange(3, -1, -1)],
    "diagonal": lambda: [torch.arange(4), torch.arange(4)],
    "swapped": lambda: [torch.arange(4)[None, :], torch.arange(6)[:, None]],
    "from one": lambda: [torch.arange(1, 4)],
    "every other": lambda: [torch.arange(0, 4, 2)],
    "twice": lambda: [torch.arange(4).repeat(2)],
}


@pytest.mark.parametrize("name", INDICES)
def test_other_indices_stay(name: str) -> None:
    assert "aten.index.Tensor" in folded(lambda x: aten.index.Tensor(x, INDICES[name]()), X)


@pytest.mark.parametrize(
    "build", [lambda: [torch.arange(4)[:, None], torch.arange(6)], lambda: [torch.arange(0, 4)], lambda: [torch.arange(0, 4, 1)[:, None]]]
)
def test_full_ranges_in_other_words(build: Callable[[], list[Tensor]]) -> None:
    assert "aten.index.Tensor" not in folded(lambda x: aten.index.Tensor(x, build()), X)
