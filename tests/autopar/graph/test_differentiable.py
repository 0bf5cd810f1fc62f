"""Which values get gradients."""

from __future__ import annotations

import torch

from autopar.graph.differentiable import differentiable
from tests.support.models.layer import X, of

aten = torch.ops.aten


def test_what_descends_from_trained_parameters_through_floats() -> None:
    def compute(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        made = layer.linear(x).relu()
        return (made.detach().cos() + made * x.sin() * (made > 0).float()).sum()

    found = {node.target for node in differentiable(of(compute, X)) if node.op == "call_function"}
    assert {aten.linear.default, aten.relu.default, aten.mul.Tensor, aten.add.Tensor, aten.sum.default} == found
