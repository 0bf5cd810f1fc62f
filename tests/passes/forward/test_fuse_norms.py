"""Norms and the sums before them: what is left of them, and what is none. Every way to write one: `tests/passes/fuse/test_forms.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.kernels.normalisation import add_norm, norm
from autopar.passes.forward.fuse_norms import FuseNorms
from tests.support.forms.norm import EPS, NORMS, N
from tests.support.forms.suite import MESH, Computing, fused, targets

aten = torch.ops.aten


@pytest.mark.parametrize("name", ["Llama", "layer norm by var_mean", "a residual, read by nobody else", "F.layer_norm in float32"])
def test_nothing_is_left_of_what_is_fused(name: str) -> None:
    _, decision, after = fused(FuseNorms(), NORMS.forms[name].module())
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
    _, _, after = fused(FuseNorms(), Blocks())
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

    _, _, after = fused(FuseNorms(), Layer())
    assert (targets(after).count(norm), targets(after).count(add_norm)) == (1, 1)


def test_of_two_norms_of_a_sum_one_adds() -> None:
    def compute(m: Any) -> Tensor:
        total = m.x + m.residual
        return torch.rms_norm(total, (N,), m.weight, EPS) + torch.layer_norm(total, (N,), m.weight, m.bias, EPS)

    _, decision, after = fused(FuseNorms(), Computing(compute, {"x": (2, N), "residual": (2, N), "weight": (N,), "bias": (N,)}))
    assert [len(each.conditions) for each in decision.fused] == [2, 1]
    assert targets(after).count(norm) == targets(after).count(add_norm) == 1


def test_a_sum_that_is_written_to_stays_outside() -> None:
    def compute(m: Any) -> Tensor:
        total = m.x + m.residual
        out = torch.rms_norm(total, (N,), None, EPS)
        return out + total.add_(1.0)

    _, decision, after = fused(FuseNorms(), Computing(compute, {"x": (2, N), "residual": (2, N)}))
    assert [each.conditions for each in decision.found] == [("RMS norm over the last dim (8), eps 1e-05, without a weight",)]
    assert norm in targets(after) and add_norm not in targets(after)


def test_the_same_again_finds_nothing() -> None:
    _, _, after = fused(FuseNorms(), Blocks())
    assert not FuseNorms().decide(after).found


def test_other_norms_are_not_looked_at() -> None:
    def compute(m: Any) -> Tensor:
        x = torch.nn.functional.group_norm(m.x, 2)
        scores = x @ x.mT / N**0.5
        return scores + m.x.square().mean().sqrt()

    _, decision, _ = fused(FuseNorms(), Computing(compute, {"x": (2, 4, N)}))
    assert str(decision) == "nothing to fuse"
