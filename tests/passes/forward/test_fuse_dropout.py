"""Dropout and the sums that read it: what is left of them, dtypes, ranks. Every way to write one: `tests/passes/fuse/test_forms.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.checks.checker import Checker
from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.compiled import Compiled
from autopar.driver.manager import History, run_passes
from autopar.ir.keys import PHASE
from autopar.ir.markers import save
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.kernels.dropout import add_dropout, dropout
from autopar.kernels.normalisation import add_norm
from autopar.passes.forward.fuse_dropout import FuseDropout
from autopar.passes.forward.fuse_norms import FuseNorms
from autopar.passes.forward.key_random import KeyRandom
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.mark_saved import MarkSaved
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.local.lower import Lower
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.testing.random_shardings import RandomShardings
from tests.support.forms.dropout import DROPOUTS, B, N, S
from tests.support.forms.suite import Computing, fused, targets, values_of
from tests.support.models.zoo import ZOO
from tests.support.programs import forward_program

aten = torch.ops.aten
OURS = (add_dropout, dropout)


def test_nothing_is_left_of_what_is_fused() -> None:
    _, decision, after = fused(FuseDropout(), DROPOUTS.forms["residual first"].module(), (), KeyRandom())
    sizes = [tuple(node.meta["val"].shape) for node in after.graph.nodes if node.op == "call_function"]
    assert len(decision.fused) == 1 and targets(after).count(add_dropout) == 1
    # The op, and what both operands are made of; of positions only those of rows and of columns.
    assert sizes.count((B, S, N)) == 3 and sizes.count((B, S, 1)) == 1
    assert not any(node.meta["val"].dtype == torch.bool for node in after.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("name", "x", "residual", "out"),
    [
        ("wider afterwards", torch.bfloat16, torch.float32, torch.float32),  # x as it is
        ("a wider residual", torch.bfloat16, torch.float64, torch.float64),
        ("a narrower residual", torch.float64, torch.bfloat16, torch.float64),
        ("wider between", torch.float32, torch.bfloat16, torch.float32),  # two of 16 bits would be added in 16 bits
        ("narrower afterwards", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_sum_is_taken_in_the_dtype_in_which_it_was(name: str, x: torch.dtype, residual: torch.dtype, out: torch.dtype) -> None:
    _, _, after = fused(FuseDropout(), DROPOUTS.forms[name].module().bfloat16(), (), KeyRandom())
    call = next(node for node in after.graph.nodes if node.target is add_dropout)
    assert [each.meta["val"].dtype for each in (*call.args[:2], call)] == [x, residual, out]
    assert [user.op for user in call.users] == ["output"]


def test_more_positions_than_32_bits_count_have_words_of_each_row() -> None:
    def compute(m: Any) -> Tensor:
        x, residual = (each.expand(2**20, 2**14) for each in (m.x, m.residual))
        return (residual + F.dropout(x, 0.25))[:1]

    _, decision, after = fused(FuseDropout(), Computing(compute, {"x": (1, 2**14), "residual": (1, 2**14)}), (), KeyRandom())
    call = next(node for node in after.graph.nodes if node.target is add_dropout)
    assert len(decision.fused) == 1
    assert [tuple(each.meta["val"].shape) for each in call.args[2:]] == [(2**20, 1), (2**20, 1), (2**14,)]


def test_the_backward_draws_again_and_holds_no_mask() -> None:
    _, _, after = fused(FuseDropout(), DROPOUTS.forms["residual first"].module(), (), KeyRandom())
    joint = run_passes(after, (TraceJoint(True), MarkSaved()))
    saved = [node.meta["val"] for node in joint.graph.nodes if node.target is save]
    assert targets(joint).count(dropout) == 1
    assert not any(value.shape == (B, S, N) for value in saved) and all(value.numel() <= B * S for value in saved)


def test_nothing_is_said_of_other_sums() -> None:
    def compute(m: Any) -> Tensor:
        """In evaluation, of probability 0, times something, and what a hand drops."""
        kept = m.residual + F.dropout(m.x, 0.5, training=False) + F.dropout(m.x, 0.0)
        return kept * F.dropout(m.x, 0.5) + m.x * (torch.rand_like(m.x) < 0.5) * 2.0 + m.x * (m.residual < 3) * 2.0 + 1.0

    _, decision, _ = fused(FuseDropout(), Computing(compute, {"x": (B, S, N), "residual": (B, S, N)}), (), KeyRandom())
    assert not decision.found and str(decision) == "nothing to fuse"


class Normalised(nn.Module):
    """The sum is normalised, as in BERT; then once more without a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.residual = nn.Parameter(torch.randn(B, S, N)), nn.Parameter(torch.randn(B, S, N))
        self.norm = nn.LayerNorm(N)

    def forward(self) -> Tensor:
        total = self.norm(self.residual + F.dropout(self.x.tanh(), 0.25))
        return total + F.dropout(total.tanh(), 0.5)


def test_a_sum_that_a_norm_takes_stays_there_and_its_dropout_draws_in_the_op() -> None:
    module = Normalised()
    program, decision, after = fused(FuseDropout(), module, (), FuseNorms(), KeyRandom())
    assert [str(each).split(" fused: ")[1] for each in decision.found] == ["p = 0.25; its sum is normalised by an op", "p = 0.5"]
    assert [target for target in targets(after) if target in (add_norm, add_dropout, dropout)] == [dropout, add_norm, add_dropout]
    values = values_of(program, module)
    for one, other in zip(after.module()(*values), program.module()(*values), strict=True):
        assert torch.equal(one, other)


def with_dropout_fused(passes: Sequence[Any]) -> list[Any]:
    """`passes` with this one behind `KeyRandom`."""
    others = [each for each in passes if not isinstance(each, FuseDropout)]
    place = next(position for position, each in enumerate(others) if isinstance(each, KeyRandom))
    return [*others[: place + 1], FuseDropout(), *others[place + 1 :]]


def parallel(name: str, mesh: Mesh, seed: int | None = None) -> ParallelModule:
    """A model with dropout and all ops of ours on `mesh`, by the search's plan or a random one."""
    case, history = ZOO[name](dropout=0.1), History()
    passes = with_dropout_fused(default_passes(Options(Cluster.ideal(), kernels="triton"), training=True))
    passes = [RandomShardings(seed) if seed is not None and isinstance(each, ChooseShardings) else each for each in passes]
    batch = dict(sorted(case.batch.items()))  # as a call has them
    schedule = run_passes(forward_program(case.model, batch, mesh), passes, (Checker(), history))
    programs = (history.program(kind) for kind in (KeyRandom, InsertReshards, Lower))
    compiled = Compiled.of(*programs, schedule, steps=history.graph_steps)
    return ParallelModule(case.model, mesh, capture=lambda args, kwargs, pins=None, shares=None: compiled, backend="eager")


@pytest.mark.parametrize(
    ("name", "sums", "alone"),
    [
        ("gpt2", 1, 1),  # attention's sum is normalised in the block that adds, the block's own sum behind it
        pytest.param("bert", 0, 2, marks=pytest.mark.slow),  # every sum is normalised in the module that adds
    ],
)
def test_models_on_four_ranks_are_exact(name: str, sums: int, alone: int) -> None:
    module = parallel(name, virtual_mesh(dp=2, tp=2))
    report = module.verify(promote=True, **ZOO[name]().batch)
    assert report and report.worst <= 1e-9, str(report)
    forward = [node for node in module.compiled.program.graph.nodes if PHASE.get(node) == "forward"]
    assert [sum(node.target is op for node in forward) for op in OURS] == [sums, alone]
    assert module.summary()["flops_split"] >= 0.98


@pytest.mark.parametrize(
    ("mesh", "seed"), [(virtual_mesh(dp=2, tp=2), 0), (virtual_mesh(tp=4), 1), pytest.param(virtual_mesh(dp=4), 2, marks=pytest.mark.slow)]
)
def test_random_plans_are_exact(mesh: Mesh, seed: int) -> None:
    """The same masks, however positions are split."""
    report = parallel("gpt2", mesh, seed).verify(promote=True, **ZOO["gpt2"]().batch)
    assert report and report.worst <= 1e-9, str(report)
