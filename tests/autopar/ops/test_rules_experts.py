"""Grouped products: the dims of the matrix product may be split, rows that are sorted by expert and experts may not.

One op is transformers' own, registered when its experts are imported; runs are of unequal lengths and do not cover all rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (registers the op)

import autopar.testing.prove
from autopar.ir.mesh import Mesh
from autopar.ops.lookup import rule_of
from autopar.ops.strategies import build, factors_of, space_of
from autopar.testing.prove import instance, prove, prove_strategy

ROWS, WEIGHT, OFFSETS = torch.empty(10, 4), torch.empty(3, 4, 6), torch.empty(3, dtype=torch.int32)
ops, aten = torch.ops.transformers, torch.ops.aten
INSTANCES: dict[str, tuple[Any, tuple[torch.Tensor, ...], int, str]] = {
    "forward": (ops.grouped_mm_fallback.default, (ROWS, WEIGHT, OFFSETS), 2 * 10 * 4 * 6, "k n"),
    "backward": (ops.grouped_mm_fallback_backward.default, (ROWS, WEIGHT, OFFSETS, torch.empty(10, 6)), 4 * 10 * 4 * 6, "k n"),
}


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


HALF: dict[str, tuple[tuple[torch.Tensor, ...], int, str]] = {
    "rows by weights": ((half(16, 32), half(3, 32, 16), OFFSETS), 2 * 16 * 32 * 16, "k n"),
    "columns by rows": ((half(32, 16), half(16, 16), OFFSETS), 2 * 32 * 16 * 16, "m n"),
    "weights by columns": ((half(3, 16, 32), half(32, 16), OFFSETS), 2 * 16 * 32 * 16, "k m"),
    "weights by weights": ((half(3, 16, 32), half(3, 32, 16)), 2 * 3 * 16 * 32 * 16, "e k m n"),
    "a dim of one piece": ((half(16, 8), half(3, 8, 16), OFFSETS), 2 * 16 * 8 * 16, "n"),
}


def draw_offsets(monkeypatch: pytest.MonkeyPatch, offsets: list[int], in_bfloat16: bool = False) -> None:
    """Proofs draw any integers; offsets rise, and one run is empty. In bfloat16 small integers are exact, sums of them as well."""
    draw = autopar.testing.prove._random

    def values(*arguments: Any) -> torch.Tensor:
        value = draw(*arguments)
        if not value.is_floating_point():
            return torch.tensor(offsets, dtype=value.dtype)
        return value.clamp(-1, 1).round().bfloat16() if in_bfloat16 else value

    monkeypatch.setattr(autopar.testing.prove, "_random", values)
    if in_bfloat16:
        monkeypatch.setattr(autopar.testing.prove, "_promoted", lambda dtype: dtype)


@pytest.mark.parametrize("name", INSTANCES)
def test_whole_equals_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that belong to no expert give zero."""
    draw_offsets(monkeypatch, [2, 2, 9])
    target, operands, flops, factors = INSTANCES[name]
    node = instance(target, *operands)
    rule = rule_of(node)
    assert rule is not None and rule.flops == flops
    assert " ".join(sorted(factor.name for factor in factors_of(node))) == factors
    assert prove(node) == []


@pytest.mark.parametrize("name", HALF)
def test_whole_equals_parts_of_torchs_own_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes bfloat16 alone, and leaves rows that belong to no expert as they come."""
    operands, flops, factors = HALF[name]
    node, mesh = instance(aten._grouped_mm.default, *operands), Mesh((("x", 2),))
    draw_offsets(monkeypatch, [2, 2, 16], in_bfloat16=True)
    rule, space = rule_of(node), space_of(node)
    assert rule is not None and rule.flops == flops
    assert " ".join(sorted(factor.name for factor in space.factors)) == factors
    for factor in space.factors:
        if factor.size % 2 == 0:
            assert prove_strategy(node, build(space, [("x", factor)], mesh), mesh) == []
