"""Ways to write rotary embeddings become one op, with the same outputs and gradients; near misses stay, each with its reason."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.fusion import FusionDecision
from autopar.ir.program import Program
from autopar.kernels.rotary import rotary
from autopar.passes.forward.fuse_rotary import FuseRotary
from tests.support.forms.rotary import FORMS, NEAR_MISSES, Turning, rotate_half
from tests.support.forms.suite import MESH, Ran, captured_suite, ran_suite, targets

aten = torch.ops.aten


@cache
def ran(training: bool, dtype: torch.dtype) -> Ran:
    return ran_suite(FuseRotary(), list(FORMS.values()), training, dtype)


def fused(module: nn.Module) -> tuple[FusionDecision, Program]:
    program = capture(module, (), {}, MESH, outputs="all")
    decision = FuseRotary().decide(program)
    return decision, FuseRotary().apply(program, decision)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_is_one_op_and_computes_the_same(name: str, training: bool) -> None:
    run = ran(training, torch.float32)
    assert [each.fused for each in run.found[name]] == [True], run.found[name]
    assert FORMS[name].finds in str(run.found[name][0])
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
    assert len(found) == 1 and not found[0].fused, found
    text = str(found[0])
    assert text.startswith("rotary embedding at rotary.py:") and f" not fused: {found[0].reason}" in text
    assert NEAR_MISSES[name].finds in text


@cache
def near_misses() -> dict[str, list[Any]]:
    suite = captured_suite(FuseRotary(), list(NEAR_MISSES.values()))
    assert not suite.decision.fused and targets(suite.after) == targets(suite.program)
    return suite.found


def test_the_suite_is_large_enough() -> None:
    assert len(FORMS) >= 20 and len(NEAR_MISSES) >= 10


def test_trained_angles_are_no_hindrance_in_inference() -> None:
    decision, _ = fused(NEAR_MISSES["trained angles"].module().requires_grad_(False))
    assert len(decision.fused) == 1


def test_nothing_is_left_of_what_is_fused() -> None:
    decision, after = fused(FORMS["part of a head"].module())
    left = [target for target in targets(after) if target not in (aten.cos.default, aten.sin.default, aten.reshape.default)]
    assert left == [aten.asinh.default, rotary] and len(decision.fused) == 1
    call = next(node for node in after.graph.nodes if node.target is rotary)
    assert call.args[0].target is aten.asinh.default and call.kwargs == {"interleaved": False}


def test_nothing_is_said_of_other_sums() -> None:
    def compute(m: Any) -> Tensor:
        joined = torch.cat((m.x * m.cos, -m.x * m.sin), -1)
        return joined[..., :8] * m.cos + m.x * m.sin + torch.cat((m.x[..., 4:], m.x[..., :4]), -1) + rotate_half(m.x)

    decision, _ = fused(Turning(compute, (1, 5, 8), {"x": (2, 4, 5, 8)}))
    assert not decision.found and str(decision) == "nothing to fuse"


def test_queries_and_keys_of_two_layers() -> None:
    def turned(x: Tensor, m: Any) -> Tensor:
        return x * m.cos + rotate_half(x) * m.sin

    def compute(m: Any) -> Tensor:
        once = turned(m.x, m) @ turned(m.key, m).mT
        return turned(once @ m.x, m) @ turned(once @ m.key, m).mT

    decision, after = fused(Turning(compute, (1, 5, 8), {"x": (2, 4, 5, 8), "key": (2, 4, 5, 8)}))
    assert len(decision.fused) == 4 and targets(after).count(rotary) == 4 and aten.cat.default not in targets(after)
