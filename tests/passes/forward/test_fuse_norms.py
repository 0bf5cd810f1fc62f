"""Ways to write norms become one op, with the same outputs and gradients; near misses stay, each with its reason."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.fusion import FusionDecision
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.kernels.normalisation import add_norm, norm
from autopar.passes.forward.fuse_norms import FuseNorms
from autopar.passes.fuse.norm.match import default_eps
from tests.support.forms import norm_near_misses  # noqa: F401  (it registers its own)
from tests.support.forms.norm import EPS, FORMS, NEAR_MISSES, N, Norming
from tests.support.forms.suite import MESH, Captured, Ran, captured_suite, ran_suite, targets

aten = torch.ops.aten


@cache
def ran(training: bool, dtype: torch.dtype) -> Ran:
    return ran_suite(FuseNorms(), list(FORMS.values()), training, dtype)


def fused(module: nn.Module) -> tuple[FusionDecision, Program]:
    program = capture(module, (), {}, MESH, outputs="all")
    decision = FuseNorms().decide(program)
    return decision, FuseNorms().apply(program, decision)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_is_one_op_and_computes_the_same(name: str, training: bool) -> None:
    run, form = ran(training, torch.float64), FORMS[name]
    found = run.found[name]
    assert [each.fused for each in found] == [True], found
    assert all(part in found[0].conditions[0] for part in form.says.split(", ")), found
    assert ("residual added inside" in found[0].conditions) == form.inside
    for one, other in zip(run.exact_after[name], run.exact[name], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_keeps_its_accuracy_in_sixteen_bits(name: str) -> None:
    """At most twice the error of the form itself in bfloat16; what it computes in float32 stays as near as float32."""
    run = ran(True, torch.bfloat16)
    assert [each.fused for each in run.found[name]] == [True], run.found[name]
    for position, true in enumerate(run.exact[name]):
        got, own = run.own_after[name][position], run.own[name][position]
        assert got.dtype == own.dtype
        rounding = 4e-3 if got.dtype == torch.bfloat16 else 1e-5
        error, allowed = ((each.double() - true).abs().max().item() for each in (got, own))
        assert error <= 2 * allowed + rounding * true.abs().max().item()


@cache
def near_misses() -> Captured:
    return captured_suite(FuseNorms(), list(NEAR_MISSES.values()))


@pytest.mark.parametrize("name", list(NEAR_MISSES))
def test_near_misses_stay_and_say_why(name: str) -> None:
    found = near_misses().found[name]
    assert found and not any(each.fused for each in found), found
    texts = [str(each) for each in found]
    assert any(NEAR_MISSES[name].says in text for text in texts), texts
    assert all(" at norm_near_misses.py:" in text and " not fused: " in text for text in texts)


def test_a_program_of_near_misses_is_left_as_it_is() -> None:
    suite = near_misses()
    assert not suite.decision.fused and targets(suite.after) == targets(suite.program)


def test_the_suite_is_large_enough() -> None:
    assert len(FORMS) >= 35 and len(NEAR_MISSES) >= 25


@pytest.mark.parametrize("name", ["Llama", "layer norm by var_mean", "a residual, read by nobody else", "F.layer_norm in float32"])
def test_nothing_is_left_of_what_is_fused(name: str) -> None:
    decision, after = fused(FORMS[name].module())
    left = {str(target).split(".")[1] for target in targets(after) if str(target).startswith("aten.")}
    assert str(decision).endswith(f"fused: {'; '.join(decision.found[0].conditions)}")
    assert left <= {"asinh", "to", "_to_copy"}, targets(after)


class Block(nn.Module):
    """Adds, for the norm of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(N, eps=EPS), nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.x = nn.ModuleList(Block() for _ in range(3)), nn.Parameter(torch.randn(2, N))

    def forward(self) -> Tensor:
        x = self.x.sin()
        for block in self.blocks:
            x = block(x)
        return x


def test_what_a_block_returns_stays_a_value_of_its_own() -> None:
    """Only if asked does it go into the norm of the next block, and never where stages are cut."""
    _, after = fused(Blocks())
    assert (targets(after).count(norm), targets(after).count(add_norm)) == (3, 0)
    assert aten.layer_norm.default not in targets(after)
    program = capture(Blocks(), (), {}, MESH, outputs="all")
    for across, adding in ((FuseNorms(across_modules=True), 2), (FuseNorms(), 0)):
        after = across.apply(program, across.decide(program))
        assert targets(after).count(add_norm) == adding and targets(after).count(aten.add.Tensor) == 3 - adding
    program = capture(Blocks(), (), {}, virtual_mesh(pp=2), outputs="all")
    assert not any("residual" in str(each) for each in FuseNorms(across_modules=True).decide(program).found)


def test_a_sum_inside_a_block_goes_into_its_norm() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Block(), nn.LayerNorm(N)
            self.x = nn.Parameter(torch.randn(2, N))

        def forward(self) -> Tensor:
            x = self.x.sin() + self.block.norm(self.x)
            return x + self.last(x)

    _, after = fused(Layer())
    assert (targets(after).count(norm), targets(after).count(add_norm)) == (1, 1)


def test_of_two_norms_of_a_sum_one_adds() -> None:
    def compute(m: Any) -> Tensor:
        total = m.x + m.residual
        return torch.rms_norm(total, (N,), m.weight, EPS) + torch.layer_norm(total, (N,), m.weight, m.bias, EPS)

    decision, after = fused(Norming(compute, {"x": (2, N), "residual": (2, N), "weight": (N,), "bias": (N,)}))
    assert [len(each.conditions) for each in decision.fused] == [2, 1]
    assert targets(after).count(norm) == targets(after).count(add_norm) == 1


def test_a_sum_that_is_written_to_stays_outside() -> None:
    def compute(m: Any) -> Tensor:
        total = m.x + m.residual
        out = torch.rms_norm(total, (N,), None, EPS)
        return out + total.add_(1.0)

    decision, after = fused(Norming(compute, {"x": (2, N), "residual": (2, N)}))
    assert [each.conditions for each in decision.found] == [("RMS norm over the last dim (8), eps 1e-05, without a weight",)]
    assert norm in targets(after) and add_norm not in targets(after)


def test_the_same_again_finds_nothing() -> None:
    _, after = fused(Blocks())
    assert not FuseNorms().decide(after).found


def test_other_norms_are_not_looked_at() -> None:
    def compute(m: Any) -> Tensor:
        x = torch.nn.functional.group_norm(m.x, 2)
        scores = x @ x.mT / N**0.5
        return scores + m.x.square().mean().sqrt()

    decision, _ = fused(Norming(compute, {"x": (2, 4, N)}))
    assert str(decision) == "nothing to fuse"


def test_the_eps_that_rms_norm_takes() -> None:
    for dtype in (torch.float32, torch.float64):
        assert default_eps(dtype) == torch.finfo(dtype).eps
    assert default_eps(torch.bfloat16) in (torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps)
