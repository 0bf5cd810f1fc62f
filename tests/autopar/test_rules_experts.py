"""Grouped products: the dims of the matrix product may be split, rows that are sorted by expert and experts may not.

One op is transformers' own, registered when its experts are imported; runs are of unequal lengths and do not cover all rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (registers the op)

import autopar.prove
from autopar.prove import instance, prove
from autopar.rule import rule_of
from autopar.strategies import factors_of

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
    "weights by columns": ((half(3, 16, 32), half(32, 16), OFFSETS), 2 * 16 * 32 * 16 * 3, "m k"),
    "weights by weights": ((half(3, 16, 32), half(3, 32, 16)), 2 * 3 * 16 * 32 * 16, "e m k n"),
    "a dim of one piece": ((half(16, 8), half(3, 8, 16), OFFSETS), 2 * 16 * 8 * 16, "n"),
}


@pytest.fixture(autouse=True)
def rising_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs draw random integers; offsets rise, one run is empty, and rows are left over. In bfloat16 values are integers, too."""
    draw = autopar.prove._random

    def values(*arguments: Any) -> torch.Tensor:
        value = draw(*arguments)
        if not value.is_floating_point():
            return torch.tensor([2, 2, 9], dtype=value.dtype)
        return value if value.dtype == torch.float64 else (value * 2).round()

    monkeypatch.setattr(autopar.prove, "_random", values)


@pytest.mark.parametrize("name", INSTANCES)
def test_whole_equals_parts(name: str) -> None:
    target, operands, flops, factors = INSTANCES[name]
    node = instance(target, *operands)
    rule = rule_of(node)
    assert rule is not None and rule.flops == flops
    assert " ".join(factor.name for factor in factors_of(node)) == factors
    assert prove(node) == []
