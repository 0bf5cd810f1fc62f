"""Equal calls become one, within a phase and where nothing is drawn or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.ir.keys import PHASE
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from tests.support.graphs import assert_unchanged, find, ops, text, traced

aten = torch.ops.aten
X = torch.randn(4, 6)


def merged(function: Callable[..., Any], *tensors: Tensor) -> list[str]:
    before = traced(function, *tensors)
    after = MergeEqualCalls().apply(before)
    assert_unchanged(before, after, *tensors)
    return ops(after)


def test_equal_calls_become_one() -> None:
    def function(x: Tensor) -> Tensor:
        return aten.mul.Tensor(aten.relu.default(aten.view.default(x, [24])), aten.relu.default(aten.view.default(x, [24])))

    after = MergeEqualCalls().apply(traced(function, X))
    assert text(after) == [
        "view: aten.view.default(x_1, [24])",
        "relu: aten.relu.default(view)",
        "mul: aten.mul.Tensor(relu, relu)",
        "→ mul",
    ]
    merged(function, X)


def test_calls_differ_by_operand_literal_type_and_keyword() -> None:
    assert len(merged(lambda x: [aten.add.Tensor(x, 1), aten.add.Tensor(x, 2)], X)) == 2
    assert len(merged(lambda x: [aten.add.Tensor(x, 1), aten.add.Tensor(x, 1.0)], torch.arange(6))) == 2
    assert len(merged(lambda x: [aten.add.Tensor(x, True), aten.add.Tensor(x, 1)], torch.arange(6))) == 2
    assert len(merged(lambda x: [aten.add.Tensor(x, 2, alpha=1), aten.add.Tensor(x, 2, alpha=3)], X)) == 2
    assert len(merged(lambda x, y: [aten.relu.default(x), aten.relu.default(y)], X, X.clone())) == 2
    assert len(merged(lambda x: [aten.view.default(x, [6, 4]), aten.view.default(x, [3, 8])], X)) == 2


def test_zeros_of_either_sign_stay_apart() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [aten.reciprocal.default(aten.full_like.default(x, value)) for value in (0.0, -0.0, 0.0)]

    found = traced(function, X)
    assert ops(MergeEqualCalls().apply(found)).count("aten.full_like.default") == 2
    one, other, _ = MergeEqualCalls().apply(found).module()(X)
    assert bool((one == torch.inf).all()) and bool((other == -torch.inf).all())


def test_both_outputs_may_be_one_value() -> None:
    assert merged(lambda x: (aten.relu.default(x), aten.relu.default(x)), X) == ["aten.relu.default"]


def test_results_of_one_call_are_named_once() -> None:
    def function(x: Tensor) -> list[Tensor]:
        values, indices = aten.max.dim(x, 1)
        again, _ = aten.max.dim(x, 1)
        return [values, again, indices]

    assert merged(function, X).count("aten.max.dim") == 1


def test_draws_are_never_merged() -> None:
    after = MergeEqualCalls().apply(traced(lambda x: [aten.bernoulli.p(x, 0.5), aten.bernoulli.p(x, 0.5)], X))
    assert ops(after).count("aten.bernoulli.p") == 2


def test_what_the_backward_recomputes_stays_there() -> None:
    program = traced(lambda x: [aten.relu.default(x), aten.relu.default(x)], X)
    first, second = find(program, aten.relu.default)
    PHASE[first], PHASE[second] = "forward", "backward"
    assert len(ops(MergeEqualCalls().apply(program))) == 2
