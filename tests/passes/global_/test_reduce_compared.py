"""Values that are compared are reduced once, so that what is equal on one device is equal on the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.driver.manager import run_passes
from autopar.ir.keys import PHASE, SHARDING
from autopar.ir.markers import reduced, save
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.ops.strategies import strategies_of
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.mark_saved import MarkSaved
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from autopar.passes.global_.reduce_compared import ReduceCompared
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.local.lower import Lower
from autopar.testing.random_shardings import RandomShardings
from tests.support.graphs import find, ops, traced
from tests.support.programs import assert_close, forward_program, inputs_of, run, run_local

aten = torch.ops.aten
MESH = virtual_mesh(tp=4)


class Least(nn.Module):
    """The gradient of a minimum over what may be held as a sum over ranks, seen through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(12, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first).view(32, 2).amin(0).sin().sum()


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 12, dtype=torch.float64)}


def prepared(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> Program:
    passes = (TraceJoint(), FoldNoOps(), MarkSaved(), MergeEqualCalls(), ReduceCompared(), FindAtoms(), RefineMesh())
    return run_passes(forward_program(model, kwargs, MESH), passes)


def test_of_an_unreduced_sum_that_is_compared_there_is_one_reduction_and_gradients_are_exact() -> None:
    torch.manual_seed(3)
    model, kwargs = Least(), batch()
    program = prepared(model, kwargs)
    inputs = inputs_of(program, model, (), kwargs)
    wanted = run(program, inputs)
    num_unreduced = 0
    for seed in range(40):
        planned = run_passes(program, (RandomShardings(seed, calm=0.7), InsertReshards()))
        (product,) = find(planned, aten.mm.default)[:1]
        num_unreduced += bool(SHARDING[product][0].unreduced)
        assert len(product.users) == 1  # the reduction, or the mark itself
        assert_close(run_local(run_passes(planned, (Lower(),)), inputs), wanted, 1e-9)
    assert num_unreduced > 5


def test_both_phases_read_what_is_settled() -> None:
    program = prepared(Least(), batch())
    product, *_ = find(program, aten.mm.default)
    (mark,) = product.users
    (compared,) = find(program, aten.eq.Tensor)
    assert mark.target is reduced and PHASE[mark] == "forward" and PHASE[compared] == "backward"
    assert {user.target for user in mark.users} == {aten.view.default, save}


@pytest.mark.parametrize(
    "compute",
    [
        lambda y: y.norm(p=math.inf, dim=1).sin().sum(),  # its backward compares |y|
        lambda y: (y.sin() * (y[:, :2] >= y.amax(1, keepdim=True)).any(1, keepdim=True)).sum(),
        lambda y: (y.sin() * (y.gather(1, y.argmax(1, keepdim=True)) >= y.amax(1, keepdim=True))).sum(),
        lambda y: (y.sin() * ((y - y.amax(1, keepdim=True)) == 0)).sum(),
        lambda y: (y[:, :4].sin() * (y[:, :4] >= y[:, 4:])).sum(),
    ],
    ids=["infinite norm", "slice", "gather", "difference", "halves"],
)
def test_what_is_compared_is_settled_where_it_was_made(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Compared(Least):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(x @ self.first)

    product, *_ = find(prepared(Compared(), batch()), aten.mm.default)
    assert [user.target for user in product.users] == [reduced]


def test_what_is_settled_may_be_split_but_is_no_unreduced_sum() -> None:
    program = prepared(Least(), batch())
    mark, *_ = find(program, reduced)
    strategies = strategies_of(mark, program.mesh, program.freedom)
    assert not any(each.unreduced for strategy in strategies for each in (*strategy.operands, *strategy.results))
    assert any(strategy.num_shards == 4 for strategy in strategies)


def test_comparisons_of_users_are_seen_through_views() -> None:
    x, w = torch.randn(8, 12), torch.randn(12, 6)
    traced_twice = traced(lambda x, w: (x @ w).view(4, 12) >= (x @ w).t().amax(), x, w)
    program = run_passes(traced_twice, (MergeEqualCalls(), ReduceCompared()))
    (product,) = find(program, aten.mm.default)
    assert [user.target for user in product.users] == [reduced]


def test_integers_inputs_and_comparisons_with_numbers_are_left_alone() -> None:
    ids, x = torch.arange(6), torch.randn(6)
    program = traced(lambda ids, x: torch.where((ids + 1) == (ids * 2), x.sin(), x) + (x.cos() > 0) + (x == x), ids, x)
    assert ops(ReduceCompared().apply(program)) == ops(program)
