"""Gates and biased activations: what is left of them, and what is none. Every way to write one: `tests/passes/fuse/test_forms.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from autopar.kernels.gated import gated
from autopar.passes.forward.fuse_gates import FuseGates
from tests.support.forms.gate import GATES
from tests.support.forms.suite import Computing, fused, targets

aten = torch.ops.aten


def test_nothing_is_left_of_what_is_fused() -> None:
    _, decision, after = fused(FuseGates(), GATES.forms["gelu by tanh and pow"].module())
    assert targets(after) == [aten.asinh.default, aten.asinh.default, gated] and len(decision.fused) == 1
    _, decision, after = fused(FuseGates(), GATES.forms["float32 inside"].module().bfloat16())
    assert targets(after) == [aten.asinh.default, aten.asinh.default, gated]
    assert next(node for node in after.graph.nodes if node.target is gated).meta["val"].dtype == torch.bfloat16


def test_an_activation_in_several_ops_is_one_op() -> None:
    def compute(m: Any) -> Tensor:
        x = m.x
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))

    module = Computing(compute, {"x": (2, 8)})
    _, decision, after = fused(FuseGates(is_asked=False), module)
    assert targets(after) == [aten.asinh.default, aten.gelu.default] and "gelu_tanh written by hand" in str(decision)
    _, decision, after = fused(FuseGates(joins_written=False), module)
    assert not decision.fused and aten.tanh.default in targets(after)


def test_unequal_dtypes_are_cast_to_the_wider() -> None:
    _, decision, after = fused(FuseGates(), GATES.forms["unequal dtypes"].module().float())
    call = next(node for node in after.graph.nodes if node.target is gated)
    assert {operand.meta["val"].dtype for operand in call.args} == {torch.float64}
    assert "gate widened from torch.float32 to torch.float64" in str(decision)


def test_nothing_is_said_of_other_products() -> None:
    def compute(m: Any) -> Tensor:
        gate = silu(m.gate) * 2.0
        four = 0.5 * m.gate * aten.add.Scalar(torch.erf(m.gate / 2**0.5), 1.0, 4.0) * m.up
        five = m.up / aten.add.Scalar(torch.exp(-m.gate), 1.0, 5.0)
        return (gate * gate.new_ones(())) + m.gate * m.up + m.up / m.gate + torch.sigmoid(m.up) * 0.5 + m.up.long() * 2 + four + five

    _, decision, _ = fused(FuseGates(), Computing(compute, {"gate": (2, 8), "up": (2, 8)}))
    assert not decision.found and str(decision) == "nothing to fuse"


def test_gates_of_gates_and_layers_of_them() -> None:
    def compute(m: Any) -> Tensor:
        inner = silu(m.gate) * m.up
        outer = torch.sigmoid(inner) * inner
        return silu(outer) * (torch.relu(m.gate) * inner)

    _, decision, after = fused(FuseGates(), Computing(compute, {"gate": (2, 8), "up": (2, 8)}))
    assert len(decision.fused) == 4 and targets(after).count(gated) == 4 and len(targets(after)) == 6


def test_a_linear_keeps_its_own_bias() -> None:
    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self) -> Tensor:
            return torch.relu(self.linear(self.linear.weight))

    _, decision, after = fused(FuseGates(), Perceptron())
    assert not decision.found and targets(after) == [aten.linear.default, aten.relu.default]


def test_a_polynomial_of_sixty_diamonds_takes_no_time() -> None:
    def compute(m: Any) -> Tensor:
        y = m.x
        for _ in range(60):
            y = y - 0.5 * y
        return 0.5 * m.x * (1.0 + torch.tanh(y))

    _, decision, after = fused(FuseGates(is_asked=False), Computing(compute, {"x": (2, 8)}))
    assert not decision.fused and aten.tanh.default in targets(after)
