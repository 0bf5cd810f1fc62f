"""Whole actions in the order that was asked for, and where the outputs are handed out."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import ScheduleError
from autopar.ir.actions import SINGLE, PipelineSchedule
from autopar.ir.instructions import Pause, Run
from autopar.ir.mesh import Mesh
from autopar.passes.schedule.order_actions import OrderActions
from autopar.pipeline.schedules import GENERATORS, generate
from tests.support.models.chain import schedule_after, schedules


@pytest.mark.parametrize("name", GENERATORS)
def test_the_actions_run_in_the_order_that_was_asked_for(name: str) -> None:
    order = generate(name, 2, 4)
    for schedule, row in zip(schedules(order), order.orders, strict=True):
        assert [each.action for each in schedule.spans] == [str(action) for action in row]
        for span in schedule.spans:
            inside = [each for each in schedule.instructions[span.begin : span.end] if isinstance(each, Run)]
            numbers = {name.partition("@")[2] for each in inside for name in each.outputs}
            assert numbers <= {span.action[2:]} | {""}, f"{span.action} computes values of microbatches {numbers}"


def test_an_order_that_cannot_run_is_refused_with_its_picture() -> None:
    order = generate("1f1b", 2, 4)
    first, last = order.orders
    faulty = PipelineSchedule("mine", order.stages, 4, (first, (last[1], last[0], *last[2:])))
    with pytest.raises(ScheduleError, match="1B0") as caught:
        schedules(faulty)
    assert "rank 1 |" in "\n".join(caught.value.__notes__)


def test_one_microbatch_through_one_stage_pauses_between_its_halves() -> None:
    (schedule,) = schedule_after(OrderActions, SINGLE, Mesh((("dp", 2),))).places
    assert [str(each).split(" (")[0] for each in schedule.instructions] == ["RUN 0F0", "PAUSE", "RUN 0B0", "RUN 0REDUCE_GRAD"]
    assert not schedule.is_over_at_pause


@pytest.mark.parametrize(("mesh", "number"), [(Mesh((("pp", 2),)), 2), (Mesh((("dp", 2),)), 4), (Mesh((("pp", 2),)), 1)])
def test_in_any_other_order_all_is_over_at_pause(mesh: Mesh, number: int) -> None:
    program = schedule_after(OrderActions, generate("1f1b", mesh.size_of(mesh.parts("pp")), number), mesh)
    for schedule in program.places:
        assert schedule.is_over_at_pause and [at for at, each in enumerate(schedule.instructions) if isinstance(each, Pause)] == [
            len(schedule.instructions) - 1
        ]


def test_without_gradients_there_are_forwards_and_no_pause() -> None:
    with torch.no_grad():
        program = schedule_after(OrderActions, generate("1f1b", 2, 2))
    names = [[each.fragment for each in schedule.instructions if isinstance(each, Run)] for schedule in program.places]
    assert names == [["0F0", "0F1"], ["1F0", "1F1"]]
    assert not any(isinstance(each, Pause) or schedule.is_over_at_pause for schedule in program.places for each in schedule.instructions)
