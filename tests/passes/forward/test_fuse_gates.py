"""Ways to write gates become one op, with the same outputs and gradients; near misses stay, each with its reason."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from autopar.frontend.capture import capture
from autopar.ir.fusion import FusionDecision
from autopar.ir.program import Program
from autopar.kernels.gated import bias_activation, gated
from autopar.passes.forward.fuse_gates import FuseGates
from tests.support.forms import gate_near_misses  # noqa: F401  (it registers its own)
from tests.support.forms.gate import FORMS, NEAR_MISSES, Gating
from tests.support.forms.suite import MESH, Ran, captured_suite, ran_suite, targets

aten = torch.ops.aten
FUSED = {"gate": gated, "bias": bias_activation}


@cache
def ran(training: bool, dtype: torch.dtype) -> Ran:
    return ran_suite(FuseGates(), list(FORMS.values()), training, dtype)


def fused(module: nn.Module) -> tuple[FusionDecision, Program]:
    program = capture(module, (), {}, MESH, outputs="all")
    decision = FuseGates().decide(program)
    return decision, FuseGates().apply(program, decision)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_is_one_op_and_computes_the_same(name: str, training: bool) -> None:
    run, (activation, kind) = ran(training, torch.float32), FORMS[name].kind.split()
    found = run.found[name]
    assert [each.fused for each in found] == [True], found
    assert found[0].conditions[0].split()[0] == activation and found[0].what == {"gate": "gate", "bias": "biased activation"}[kind]
    for one, other in zip(run.exact_after[name], run.exact[name], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_keeps_its_accuracy_in_sixteen_bits(name: str) -> None:
    """At most twice the error of the form itself in bfloat16."""
    run = ran(True, torch.bfloat16)
    assert [each.fused for each in run.found[name]] == [True], run.found[name]
    for position, true in enumerate(run.exact[name]):
        got, own = run.own_after[name][position], run.own[name][position]
        assert got.dtype == own.dtype
        error, allowed = ((each.double() - true).abs().max().item() for each in (got, own))
        assert error <= 2 * allowed + 4e-3 * true.abs().max().item()


@pytest.mark.parametrize("name", list(NEAR_MISSES))
def test_near_misses_stay_and_say_why(name: str) -> None:
    found = near_misses()[name]
    assert found and not any(each.fused for each in found), found
    texts = [str(each) for each in found]
    assert any(NEAR_MISSES[name].reason in text for text in texts), texts
    assert all(" at gate_near_misses.py:" in text and " not fused: " in text for text in texts)


@cache
def near_misses() -> dict[str, list[Any]]:
    suite = captured_suite(FuseGates(), list(NEAR_MISSES.values()))
    assert not suite.decision.fused and targets(suite.after) == targets(suite.program)
    return suite.found


def test_the_suite_is_large_enough() -> None:
    assert len(FORMS) >= 40 and len(NEAR_MISSES) >= 16


def test_nothing_is_left_of_what_is_fused() -> None:
    decision, after = fused(FORMS["gelu by tanh and pow"].module())
    assert targets(after) == [aten.asinh.default, aten.asinh.default, gated] and len(decision.fused) == 1
    decision, after = fused(FORMS["float32 inside"].module().bfloat16())
    assert targets(after) == [aten.asinh.default, aten.asinh.default, gated]
    assert next(node for node in after.graph.nodes if node.target is gated).meta["val"].dtype == torch.bfloat16


def test_unequal_dtypes_are_cast_to_the_wider() -> None:
    decision, after = fused(FORMS["unequal dtypes"].module().float())
    call = next(node for node in after.graph.nodes if node.target is gated)
    assert {operand.meta["val"].dtype for operand in call.args} == {torch.float64}
    assert "gate widened from torch.float32 to torch.float64" in str(decision)


def test_nothing_is_said_of_other_products() -> None:
    def compute(m: Any) -> Tensor:
        gate = silu(m.gate) * 2.0
        return (gate * gate.new_ones(())) + m.gate * m.up + m.up / m.gate + torch.sigmoid(m.up) * 0.5 + m.up.long() * 2

    decision, _ = fused(Gating(compute, {"gate": (2, 8), "up": (2, 8)}))
    assert not decision.found and str(decision) == "nothing to fuse"


def test_gates_of_gates_and_layers_of_them() -> None:
    def compute(m: Any) -> Tensor:
        inner = silu(m.gate) * m.up
        outer = torch.sigmoid(inner) * inner
        return silu(outer) * (torch.relu(m.gate) * inner)

    decision, after = fused(Gating(compute, {"gate": (2, 8), "up": (2, 8)}))
    assert len(decision.fused) == 4 and targets(after).count(gated) == 4 and len(targets(after)) == 6


def test_a_linear_keeps_its_own_bias() -> None:
    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self) -> Tensor:
            return torch.relu(self.linear(self.linear.weight))

    decision, after = fused(Perceptron())
    assert not decision.found and targets(after) == [aten.linear.default, aten.relu.default]
