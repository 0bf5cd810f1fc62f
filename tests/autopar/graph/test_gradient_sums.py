from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.graph.gradient_sums import sums_in_other_dtypes
from autopar.ir.mesh import virtual_mesh
from autopar.ir.precision import MixedPrecision
from autopar.ir.program import Program
from autopar.passes.forward.cast_to_precision import CastToPrecision
from autopar.passes.global_.trace_joint import TraceJoint

BF16, F32 = torch.bfloat16, torch.float32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.positions = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.linear(x.flip(0)) + self.positions(torch.arange(4)[None])
        return self.norm(x).square().mean()


def traced(precision: MixedPrecision | None) -> Program:
    captured = capture(Model(), (torch.rand(2, 4, 8),), {}, virtual_mesh(dp=2))
    return TraceJoint().apply(CastToPrecision(precision).apply(captured))


def named(program: Program) -> set[tuple[str, torch.dtype]]:
    return {(str(node.target).split(".")[1], node.meta["val"].dtype) for node in sums_in_other_dtypes(program)}


def test_what_is_cast_afterwards_is_summed_afterwards() -> None:
    """The products and sums that make gradients, what is added up of them, and the sum over the batch before a table's gradient."""
    found = named(traced(MixedPrecision()))
    assert {dtype for _, dtype in found} == {BF16}
    assert {"mm", "add", "sum", "embedding_dense_backward"} <= {op for op, _ in found}


def test_what_was_cast_before_is_summed_before() -> None:
    program = traced(MixedPrecision(reduce=BF16))
    found = sums_in_other_dtypes(program)
    assert {node.meta["val"].dtype for node in found} == {F32}
    # The norm's gradients are float32 all the way: there is no choice.
    gradients = {output.name: node for output, node in program.named_outputs() if output.kind == "gradient"}
    assert {name for name, node in gradients.items() if node in found} == {"linear.weight", "linear.bias", "positions.weight"}


@pytest.mark.parametrize("reduce", [None, F32])
def test_a_program_without_casts_has_none(reduce: torch.dtype | None) -> None:
    assert not sums_in_other_dtypes(replace(traced(None), reduce=reduce))


def test_what_flows_on_to_other_layers_is_none_of_it() -> None:
    program = traced(MixedPrecision())
    gradients = [node for output, node in program.named_outputs() if output.kind == "gradient"]
    products = {node for node in sums_in_other_dtypes(program) if "mm" in str(node.target)}
    reached = {user for node in products for user in node.users}
    assert products and all(str(user.target) in ("aten.t.default", "aten.add.Tensor", "aten._to_copy.default") for user in reached), reached
    assert len(gradients) == 5
