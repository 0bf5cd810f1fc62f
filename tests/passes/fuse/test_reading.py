"""Values up to casts and numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.passes.fuse.reading import is_alike, name_of, narrowest, rounded, scaled, widened, widest
from tests.support.graphs import traced

aten = torch.ops.aten


def test_casts_that_widen_are_read_past_and_one_that_rounds_is_taken_along() -> None:
    def compute(x: Tensor) -> Tensor:
        return (x.float() * 2.0).to(torch.bfloat16) + x.double().to(torch.bfloat16)

    program = traced(compute, torch.ones(4, dtype=torch.bfloat16))
    x = program.placeholders[0]
    product = next(node for node in program.graph.nodes if node.target is aten.mul.Tensor)
    (wide,) = product.all_input_nodes
    assert narrowest(wide) is x and {x, wide} < widened(wide) and len(widened(x)) == 3
    assert rounded(product) in product.users and rounded(wide) is wide
    assert list(scaled(product, lambda value: value if isinstance(value, float) else None)) == [(wide, 2.0)]
    assert is_alike(wide, product) and widest(x, wide) == torch.float32 and name_of(product) == "mul"


def test_a_negation_and_a_quotient_are_scales_and_a_division_by_zero_is_none() -> None:
    def number(value: object) -> float | None:
        return value if isinstance(value, float) else None

    program = traced(lambda x: -(x / 4.0) + x / 0.0 + 2.0 * x, torch.ones(4))
    found = [factor for node in program.graph.nodes for _, factor in scaled(node, number)]
    assert sorted(found) == [-1.0, 0.25, 2.0]
