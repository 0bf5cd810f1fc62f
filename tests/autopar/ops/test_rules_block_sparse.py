"""The rules of block-sparse attention are proved as the others are: run whole and in parts. What they must find is listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar.kernels.block_sparse  # noqa: F401 (registers the ops)
from autopar.ops.lookup import rule_of
from autopar.ops.strategies import factors_of
from autopar.testing.prove import instance, prove

ops: Any = torch.ops.autopar
OPTIONS: dict[str, Any] = {"block_size": 16, "is_causal": False, "scale": 0.3}
CAUSAL = OPTIONS | {"is_causal": True}


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def layout(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bool)


Q, KV, LSE = half(2, 4, 64, 8), half(2, 2, 40, 8), half(2, 4, 64)
WIDE, RAGGED = half(2, 4, 40, 8), half(2, 4, 50, 8)
# Operands, options, factors that the rule must find.
INSTANCES: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = {
    "one layout": ((Q, KV, KV, layout(1, 4, 3)), OPTIONS, "b g r n"),
    "a layout for each head": ((Q, KV, KV, layout(4, 4, 3)), OPTIONS, "b g r n"),
    "a layout for each head of as many key heads": ((Q, WIDE, WIDE, layout(4, 4, 3)), OPTIONS, "b g n"),
    "a layout for each sequence": ((Q, KV, KV, layout(2, 1, 4, 3)), OPTIONS, "b g r n"),
    "a layout for each sequence and head": ((Q, KV, KV, layout(2, 4, 4, 3)), OPTIONS, "b g r n"),
    "causal": ((Q, KV, KV, layout(4, 4, 3)), CAUSAL, "b g r"),
    "a ragged block of queries": ((RAGGED, KV, KV, layout(4, 4, 3)), OPTIONS, "b g r"),
    "one block of queries": ((half(2, 4, 16, 8), KV, KV, layout(4, 1, 3)), OPTIONS, "b g r"),
    "values of another size": ((Q, KV, half(2, 2, 40, 12), layout(4, 4, 3)), OPTIONS, "b g r n"),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_whole_equals_parts(name: str) -> None:
    operands, options, factors = INSTANCES[name]
    node = instance(ops.block_sparse_attention.default, *operands, **options)
    rule = rule_of(node)
    assert rule is not None and rule.linear == ()
    assert prove(node) == []
    assert {factor.name for factor in factors_of(node) if factor.size > 1} == set(factors.split())


@pytest.mark.parametrize("has_sum", [False, True])
@pytest.mark.parametrize("name", INSTANCES)
def test_the_backward_whole_equals_parts(name: str, has_sum: bool) -> None:
    operands, options, factors = INSTANCES[name]
    out = half(*operands[0].shape[:3], operands[2].shape[-1])
    rows = half(*out.shape[:3])
    arguments = (out, rows if has_sum else None, *operands, out, rows)
    node = instance(ops.block_sparse_attention_backward.default, *arguments, **options)
    rule = rule_of(node)
    assert rule is not None and rule.linear == (frozenset(range(1 + has_sum)),)
    assert prove(node) == []
    assert {factor.name for factor in factors_of(node) if factor.size > 1} == set(factors.split())


def test_flops_are_those_of_the_dense_products() -> None:
    """Of the blocks that there are nothing is known: the count is an upper bound."""
    forward = instance(ops.block_sparse_attention.default, Q, KV, half(2, 2, 40, 12), layout(1, 4, 3), **OPTIONS)
    out = half(2, 4, 64, 12)
    arguments = (out, None, Q, KV, half(2, 2, 40, 12), layout(1, 4, 3), out, LSE)
    backward = instance(ops.block_sparse_attention_backward.default, *arguments, **OPTIONS)
    scores = 2 * 2 * 4 * 64 * 40
    rules = [rule_of(node) for node in (forward, backward)]
    assert [rule.flops for rule in rules if rule is not None] == [scores * (8 + 12), scores * (3 * 8 + 2 * 12)]
