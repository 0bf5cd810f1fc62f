"""The rules of our fused ops are proved as the others are: run whole and in parts. What they must find is listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar.kernels.normalisation
import autopar.kernels.softmax  # noqa: F401 (both register ops)
from autopar.prove import instance, prove
from autopar.rule import rule_of
from autopar.strategies import factors_of

ops: Any = torch.ops.autopar
X, ROWS, WEIGHT = torch.empty(2, 4, 6), torch.empty(2, 4), torch.empty(6)
MASK, COLUMN = torch.empty(4, 6, dtype=torch.bool), torch.empty(2, 4, 1)
PROBABILITY = {"scale": 0.5, "dtype": torch.float32}
EPS: dict[str, Any] = {"eps": 1e-5, "centred": True}
# op, arguments, options, factors that the rule must find, sets of operands in which it is linear
INSTANCES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str, list[set[int]]]] = {
    "softmax": (ops.softmax.default, (X, None), PROBABILITY, "d0 d1", []),
    "softmax, masked": (ops.softmax.default, (X, MASK), PROBABILITY, "d0 d1", []),
    "softmax, a number a row": (ops.softmax.default, (X, COLUMN), PROBABILITY, "d0 d1", []),
    "softmax backward": (ops.softmax_backward.default, (X, X), PROBABILITY, "d0 d1", [{0}]),
    "norm": (ops.norm.default, (X, WEIGHT, WEIGHT), EPS, "d0 d1", []),
    "norm, plain": (ops.norm.default, (X, None, None), EPS | {"centred": False}, "d0 d1", []),
    "norm of a sum": (ops.add_norm.default, (X, X, WEIGHT, None), EPS, "d0 d1", []),
    "norm backward": (
        ops.norm_backward.default,
        (X, None, X, ROWS, ROWS, WEIGHT),
        {"centred": True, "has_bias": True},
        "d0 d1",
        [{0}],
    ),
    "norm of a sum, backward": (
        ops.norm_backward.default,
        (X, X, X, ROWS, ROWS, None),
        {"centred": False, "has_bias": False},
        "d0 d1",
        [{0, 1}],
    ),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_whole_equals_parts(name: str) -> None:
    target, arguments, options, factors, linear = INSTANCES[name]
    node = instance(target, *arguments, **options)
    rule = rule_of(node)
    assert rule is not None
    assert prove(node) == []
    assert {factor.name for factor in factors_of(node)} == set(factors.split())
    assert [set(group) for group in rule.linear] == linear
