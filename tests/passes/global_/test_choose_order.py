"""The order of a pipeline: as it was asked for, or the one that takes the least time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.errors import ScheduleError
from autopar.ir.actions import SINGLE
from autopar.ir.program import Program
from autopar.passes.global_.choose_order import ChooseOrder
from autopar.pipeline.schedules import generate
from tests.support.models.residual import parallel_residual, plain_pipe

A100 = Cluster.named("8xa100")


@pytest.fixture(scope="module")
def program() -> Program:
    return next(step.program for step in plain_pipe().compiled.steps if step.name == "place stages")


def test_an_order_that_was_asked_for_stays(program: Program) -> None:
    choose = ChooseOrder(False, A100)
    assert choose.decide(program) == program.order and choose.apply(program, program.order) is program


def test_one_microbatch_through_one_stage_has_nothing_to_order() -> None:
    program = parallel_residual().compiled.program
    assert ChooseOrder(True, A100).decide(program) == SINGLE


def test_a_free_order_is_found_by_cost_for_these_stages(program: Program) -> None:
    found = ChooseOrder(True, A100).decide(program)
    assert (found.stages, found.num_microbatches) == (program.order.stages, program.order.num_microbatches)
    assert sorted(action[::2] for row in found.orders for action in row if action.kind == "F") == sorted(
        action[::2] for row in program.order.orders for action in row if action.kind == "F"
    )
    other = replace(found, name="another")
    after = ChooseOrder(True, A100).apply(program, other)
    assert after.order == other and after.graph is program.graph and program.order != other


def test_no_order_fits_into_nothing(program: Program) -> None:
    with pytest.raises(ScheduleError, match="bytes"):
        ChooseOrder(True, A100, MemoryBudget(1.0)).decide(program)


@pytest.mark.parametrize("order", [generate("1f1b", 2, 4), generate("zb-v", 2, 3), SINGLE], ids=lambda order: order.name)
def test_an_order_goes_to_other_ranks_and_back(order, program: Program) -> None:  # type: ignore[no-untyped-def]
    choose = ChooseOrder(True, A100)
    assert choose.read(program, json.loads(json.dumps(choose.written(program, order)))) == order
