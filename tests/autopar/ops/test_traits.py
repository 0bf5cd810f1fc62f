"""Which casts keep every value, and which ops write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ops.traits import PRODUCTS, is_cast, out_of_place, widens
from tests.support.graphs import ops, traced

aten = torch.ops.aten


@pytest.mark.parametrize(
    "before, after, keeps",
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float64, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.int64, torch.float64, False),
    ],
)
def test_a_cast_widens_where_every_value_survives(before: torch.dtype, after: torch.dtype, keeps: bool) -> None:
    x: Tensor = torch.ones(4).to(before)
    program = traced(lambda x: x.to(after) * 2, x)
    (cast,) = (node for node in program.graph.nodes if is_cast(node))
    assert widens(cast) is keeps, ops(program)


def test_a_cast_to_whole_numbers_is_none_and_a_product_neither() -> None:
    program = traced(lambda x: x.to(torch.int64) + (x * 2).long(), torch.ones(4))
    assert not any(is_cast(node) for node in program.graph.nodes if node.op == "call_function")


def test_out_of_place_leaves_out_what_writes() -> None:
    assert out_of_place(PRODUCTS) == (aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor)
