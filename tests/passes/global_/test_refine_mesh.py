"""Axes are broken where a parameter has fewer heads than the axis has ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.driver.manager import run_passes
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.sharding import Strategy
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.plans.keys import fingerprint
from autopar.plans.plan import Plan
from tests.support.graphs import traced, with_atoms

aten = torch.ops.aten


def heads(num_heads: int, width: int = 16, **axes: int) -> Program:
    """x @ w, whose result is viewed as `num_heads` heads of 3."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return aten.view.default(aten.mm.default(x, w), [8, num_heads, 3])

    tensors = torch.randn(8, width), torch.randn(width, num_heads * 3)
    return with_atoms(traced(function, *tensors, mesh=Mesh(tuple(axes.items())), parameters=(1,)))


@pytest.mark.parametrize(
    ("num_heads", "axes", "refined"),
    [
        (4, {"dp": 2, "tp": 4}, "dp=2 × tp=4"),
        (2, {"dp": 2, "tp": 4}, "dp=2 × tp.0=2 × tp.1=2"),
        (2, {"tp": 8, "dp": 2}, "tp.0=2 × tp.1=4 × dp=2"),
        (12, {"tp": 8}, "tp.0=4 × tp.1=2"),
        (5, {"tp": 4}, "tp=4"),
        (1, {"tp": 4}, "tp=4"),
        (2, {"dp": 4, "tp": 2}, "dp=4 × tp=2"),
        (2, {"tp": 1}, "tp=1"),
    ],
)
def test_axes(num_heads: int, axes: dict[str, int], refined: str) -> None:
    program = heads(num_heads, **axes)
    found = run_passes(program, (RefineMesh(),))
    assert str(found.mesh) == refined
    assert str(program.mesh) == " × ".join(f"{name}={size}" for name, size in axes.items()), "a pass changes no program that it was given"
    assert found.mesh.size == program.mesh.size
    for rank in range(program.mesh.size):
        for axis in axes:
            assert found.mesh.index(rank, found.mesh.parts(axis)) == program.mesh.index(rank, [axis]), "ranks keep their places"


def test_a_plan_for_this_graph_and_these_ranks_breaks_them_as_it_did() -> None:
    program, other = heads(2, dp=2, tp=4), heads(4, dp=2, tp=4)
    mesh = Mesh((("dp", 2), ("tp.0", 4), ("tp.1", 1)))
    plan = Plan(mesh, strategies={"forward - aten.mm 0": Strategy((), ())}, fingerprint=fingerprint(program))
    assert RefineMesh(plan).decide(program) == mesh != RefineMesh().decide(program)
    assert RefineMesh(plan).decide(other) == other.mesh, "another graph"
    assert str(RefineMesh(plan).decide(heads(2, dp=4, tp=4))) == "dp=4 × tp.0=2 × tp.1=2", "other ranks"
    assert RefineMesh(plan.pins()).decide(program) == RefineMesh().decide(program), "pins alone were made for no graph"


def test_the_mesh_that_parameters_lie_on_stays() -> None:
    program = heads(2, dp=2, tp=4)
    mesh = Mesh((("dp", 2), ("tp.0", 4), ("tp.1", 1)))
    plan = Plan(mesh, strategies={"forward - aten.mm 0": Strategy((), ())}, fingerprint=fingerprint(program))
    assert RefineMesh(plan, placed=True).decide(program) == program.mesh


def test_the_batch_axis_stays_whole() -> None:
    assert str(RefineMesh().decide(heads(2, width=6, dp=4))) == "dp=4"
