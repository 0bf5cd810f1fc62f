"""Sums over the microbatches are reduced over the replicas once a step, after the last backward of their stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.ir.actions import SINGLE, Reduction
from autopar.ir.instructions import Launch, Run, Wait
from autopar.ir.mesh import Mesh
from autopar.passes.schedule.reduce_gradients import ReduceGradients
from autopar.passes.schedule.write_actions import WriteActions
from autopar.pipeline.schedules import generate
from tests.support.models.chain import schedule_after, schedules
from tests.support.schedules import check_schedules


def test_gradients_are_reduced_once_a_step() -> None:
    for schedule in schedules(generate("1f1b", 2, 4), Mesh((("pp", 2), ("dp", 2)))):
        launched = [name for each in schedule.instructions if isinstance(each, Launch) for name in each.sources]
        assert launched and all(name.endswith(".sum") for name in launched)


def test_reductions_are_written_where_they_stood() -> None:
    order, mesh = generate("1f1b", 2, 2), Mesh((("pp", 2), ("dp", 2)))
    before, after = (schedule_after(last, order, mesh) for last in (WriteActions, ReduceGradients))
    assert before.actions and all(isinstance(each, Reduction) for each in before.actions.values()) and not after.actions
    for old, new in zip(before.places, after.places, strict=True):
        (at,) = [number for number, each in enumerate(old.instructions) if before.action_of(each) is not None]
        added = len(new.instructions) - len(old.instructions) + 1
        written = new.instructions[at : at + added]
        assert new.instructions[:at] == old.instructions[:at] and new.instructions[at + added :] == old.instructions[at + 1 :]
        launches = [each for each in written if isinstance(each, Launch)]
        assert launches and {(each.collective, each.kind, each.axes) for each in launches} == {("all_reduce", "sum", ("dp",))}
        assert {each.target for each in written if isinstance(each, Wait)} == {each.name for each in launches}


def test_gradients_that_nothing_is_left_to_do_for_leave_as_they_are() -> None:
    """One microbatch: its own collectives have reduced them."""
    before, after = (schedule_after(last, SINGLE, Mesh((("dp", 2),))) for last in (WriteActions, ReduceGradients))
    (old,), (new,) = before.places, after.places
    assert list(new.instructions) == [each for each in old.instructions if not (isinstance(each, Run) and each.fragment == "0REDUCE_GRAD")]


def test_equal_gradients_of_two_parameters_are_reduced_once() -> None:
    """Biases that are added to one value have one gradient; here on two stages of a rank."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            total = x = torch.tanh(self.layers[0](x))
            for layer in self.layers[1:]:
                total = total + layer(x)
            return total.square().sum()

    mesh = Mesh((("pp", 2), ("dp", 2)))
    for name, number in (("zb-v", 2), ("1f1b", 2), ("zb-v", 1), ("1f1b", 1)):
        found = schedules(generate(name, 2, number), mesh, Branches())
        check_schedules([schedule for schedule in found for _ in range(2)], mesh)
        gradients = {name for schedule in found for kind, name in schedule.left if kind == "gradient"}
        assert len(gradients) == 10
