"""What must hold around a form."""

from __future__ import annotations

import pytest
import torch

from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import NotFusible
from autopar.passes.fuse.guards import check_interior, check_operands, readers_of
from tests.support.graphs import traced

aten = torch.ops.aten


def test_an_interior_is_read_by_nobody_else() -> None:
    program = traced(lambda x: (x * 2).exp() + (x * 2).sin(), torch.ones(4))
    total = next(node for node in program.graph.nodes if node.target is aten.add.Tensor)
    inside = [node for node in program.graph.nodes if node < total and node.op == "call_function"]
    check_interior(inside, (total,), "never said")
    with pytest.raises(NotFusible, match="the sum is read elsewhere"):
        check_interior((*inside, total), (), "the sum is read elsewhere")
    assert readers_of(total) == list(total.users)


def test_an_operand_written_before_the_op_would_read_it_is_refused() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        early = y.exp()
        y.add_(1.0)
        return early.sin()

    program = traced(compute, torch.ones(4))
    operand, root = (next(node for node in program.graph.nodes if node.target is op) for op in (aten.mul.Tensor, aten.sin.default))
    with pytest.raises(NotFusible, match="add_.Tensor writes into an operand in place, in front of the sine"):
        check_operands([operand], root, writers_of(program.graph), "in front of the sine")
    check_operands([operand], root, (), "never said")
