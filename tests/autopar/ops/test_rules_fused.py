"""The rules of our fused ops are proved as the others are: run whole and in parts. What they must find is listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar.kernels.attention
import autopar.kernels.cross_entropy
import autopar.kernels.dropout
import autopar.kernels.gated
import autopar.kernels.normalisation
import autopar.kernels.projected_cross_entropy
import autopar.kernels.rotary
import autopar.kernels.softmax  # noqa: F401 (all register ops)
from autopar.ops.rule import rule_of
from autopar.ops.strategies import factors_of
from autopar.testing.prove import instance, prove
from tests.support.kernels.attention import DRAWS, DROPS, PLAIN

ops: Any = torch.ops.autopar
X, ROWS, WEIGHT = torch.empty(2, 4, 6), torch.empty(2, 4), torch.empty(6)
MASK, COLUMN = torch.empty(4, 6, dtype=torch.bool), torch.empty(2, 4, 1)
PROBABILITY = {"scale": 0.5, "dtype": torch.float32}
IDS, HEADS, ANGLES = torch.empty(2, 4, dtype=torch.int64), torch.empty(2, 4, 6, 8), torch.empty(2, 1, 6, 4)
Q, KV, LSE, BIAS = torch.empty(2, 4, 6, 8), torch.empty(2, 2, 10, 8), torch.empty(2, 4, 6), torch.empty(1, 4, 6, 10)
OF_QUERIES, OF_KEYS = torch.empty(2, 6, dtype=torch.int64), torch.empty(1, 10, dtype=torch.int64)
TABLE, TEN = torch.empty(10, 6), torch.empty(10, dtype=torch.int64)
CLASSES, SILU = torch.empty(6, dtype=torch.int64), {"activation": "silu"}
STARTS, WORD = torch.empty(2, 4, 1, dtype=torch.int64), torch.empty((), dtype=torch.int64)
DROPPED: dict[str, Any] = {"keep_below": 2**31, "scale": 2.0}
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
    "cross entropy": (ops.cross_entropy.default, (X, IDS, CLASSES), {}, "d0 d1 d2", []),
    "cross entropy backward": (ops.cross_entropy_backward.default, (ROWS, ROWS, ROWS, X, IDS, CLASSES, ROWS), {}, "d0 d1 d2", [{0, 1, 2}]),
    "cross entropy backward, less": (ops.cross_entropy_backward.default, (ROWS, None, None, X, IDS, CLASSES, ROWS), {}, "d0 d1 d2", [{0}]),
    "projected cross entropy": (ops.projected_cross_entropy.default, (X, TABLE, IDS, TEN), {}, "d0 d1 v", []),
    "projected cross entropy backward": (
        ops.projected_cross_entropy_backward.default,
        (ROWS, ROWS, None, X, TABLE, IDS, TEN, ROWS),
        {},
        "d0 d1 v",
        [{0, 1}],
    ),
    "gated": (ops.gated.default, (X, X), SILU, "d0 d1 d2", [{1}]),
    "gated backward": (ops.gated_backward.default, (X, X, X), SILU, "d0 d1 d2", [{0}]),
    "bias and activation": (ops.bias_activation.default, (X, WEIGHT), SILU, "d0 d1 d2", []),
    "bias and activation backward": (ops.bias_activation_backward.default, (X, X, WEIGHT), SILU, "d0 d1 d2", [{0}]),
    "dropout": (ops.dropout.default, (X, STARTS, WORD, CLASSES), DROPPED | {"dtype": torch.float32}, "d0 d1 d2", [{0}]),
    "dropout, words of rows": (
        ops.dropout.default,
        (X, STARTS, torch.empty(2, 1, 1, dtype=torch.int64), CLASSES),
        DROPPED | {"dtype": torch.float32},
        "d0 d1 d2",
        [{0}],
    ),
    "dropout and residual": (ops.add_dropout.default, (X, X, STARTS, WORD, CLASSES), DROPPED, "d0 d1 d2", [{0, 1}]),
    "dropout and residual, few rows": (ops.add_dropout.default, (X, X, STARTS[0], WORD, CLASSES), DROPPED, "d0 d1 d2", [{0, 1}]),
    "rotary": (ops.rotary.default, (HEADS, ANGLES, ANGLES), {"interleaved": False}, "d0 d1 d2", [{0}]),
    "rotary backward": (ops.rotary_backward.default, (HEADS, ANGLES, ANGLES), {"interleaved": True}, "d0 d1 d2", [{0}]),
    "attention, documents": (ops.attention.default, (Q, KV, KV, None, OF_QUERIES, OF_KEYS, *[None] * 3), PLAIN, "b g r s", []),
    "attention, causal, documents": (
        ops.attention.default,
        (Q, Q, Q, None, OF_QUERIES, OF_QUERIES, *[None] * 3),
        PLAIN | {"is_causal": True},
        "b g",
        [],
    ),
    "attention backward, documents": (
        ops.attention_backward.default,
        (Q, None, Q, Q, Q, None, OF_QUERIES, OF_QUERIES, *[None] * 3, Q, LSE),
        PLAIN,
        "b g s",
        [{0}],
    ),
    "attention's mask gradient": (
        ops.attention_mask_gradient.default,
        (Q, None, Q, KV, KV, BIAS, None, None, *DRAWS, Q, LSE),
        PLAIN | DROPS,
        "b g r s",
        [{0}],
    ),
    "attention's mask gradient, documents": (
        ops.attention_mask_gradient.default,
        (Q, None, Q, KV, KV, BIAS, OF_QUERIES, OF_KEYS, *[None] * 3, Q, LSE),
        PLAIN,
        "b g r s",
        [{0}],
    ),
    "attention's mask gradient, of both results": (
        ops.attention_mask_gradient.default,
        (Q, LSE, Q, KV, KV, BIAS, *[None] * 5, Q, LSE),
        PLAIN | {"soft_cap": 2.0},
        "b g r s",
        [{0, 1}],
    ),
    "attention's mask gradient, causal": (
        ops.attention_mask_gradient.default,
        (Q, None, Q, KV, KV, torch.empty(6, 10), *[None] * 5, Q, LSE),
        PLAIN | {"is_causal": True},
        "b g r",
        [{0}],
    ),
    "attention's mask gradient, in a window": (
        ops.attention_mask_gradient.default,
        (Q, None, Q, KV, KV, torch.empty(6, 10), *[None] * 5, Q, LSE),
        PLAIN | {"window": 3},
        "b g r",
        [{0}],
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


@pytest.mark.parametrize(
    ("target", "arguments", "options", "same", "linear"),
    [
        (ops.gated.default, (X, X), SILU, (0, 1), {1}),
        (ops.gated_backward.default, (X, X, X), SILU, (0, 2), {0}),
        (ops.add_dropout.default, (X, X, STARTS, WORD, CLASSES), DROPPED, (0, 1), {0, 1}),
        (ops.norm_backward.default, (X, X, X, ROWS, ROWS, WEIGHT), {"centred": True, "has_bias": True}, (0, 1), {0, 1}),
    ],
)
def test_one_value_in_two_places_is_two_operands(
    target: Any, arguments: tuple[Any, ...], options: dict[str, Any], same: tuple[int, int], linear: set[int]
) -> None:
    """A gate of its own value is not linear in it."""
    node = instance(target, *arguments, **options)
    places = list(node.args)
    places[same[1]] = places[same[0]]
    node.args = tuple(places)
    rule = rule_of(node)
    assert rule is not None and [set(group) for group in rule.linear] == [linear]
