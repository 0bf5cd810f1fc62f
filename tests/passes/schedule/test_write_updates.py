"""Parameters are updated once their gradients are final; gradients are freed then; what only they wait for is waited for early."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.checks.checker import check_schedule_program
from autopar.cost.schedule_memory import peak_bytes
from autopar.ir.instructions import Free, Instruction, Launch, Pause, Run, Update, Wait
from autopar.ir.program import Input, Output, Signature
from autopar.ir.schedule import Schedule
from autopar.passes.schedule.write_updates import MAX_UPDATES, WriteUpdates
from autopar.pipeline.schedule_program import ScheduleProgram
from tests.support.models.trained import batch, small_gpt
from tests.support.schedules import retyped, schedule_of, whole

MATRIX = ((4, 4), torch.float32)
BEFORE = """
RUN forward (w1, w2, x) -> (loss, h)
PAUSE
RUN second (w2, h) -> (d, p2)
LAUNCH all_reduce sum dp (p2) -> s2
RUN first (d) -> (p1)
FREE d h
LAUNCH all_reduce sum dp (p1) -> s1
RUN last (x) -> (unread)
FREE unread
WAIT s2
FREE p2
RUN turned (s2) -> (g2)
FREE s2
WAIT s1
FREE p1
RUN turned (s1) -> (g1)
FREE s1
"""
AFTER = """\
RUN forward (w1, w2, x) -> (loss, h)
PAUSE
RUN second (w2, h) -> (d, p2)
FREE h
LAUNCH all_reduce sum dp (p2) -> s2
RUN first (d) -> (p1)
FREE d
LAUNCH all_reduce sum dp (p1) -> s1
WAIT s2
FREE p2
RUN turned (s2) -> (g2)
FREE s2
UPDATE (w2) by (g2)
FREE g2
RUN last (x) -> (unread)
FREE unread
WAIT s1
FREE p1
RUN turned (s1) -> (g1)
FREE s1
UPDATE (w1) by (g1)
FREE g1"""


def two_layers(text: str = BEFORE, checks: bool = False) -> ScheduleProgram:
    parameters = [Input("parameter", name, *MATRIX, requires_grad=True) for name in ("one", "two")]
    outputs = [Output("loss", "0", (), torch.float32), *(Output("gradient", name, *MATRIX) for name in ("one", "two"))]
    outputs += [Output("check", "0", (), torch.float32)] if checks else []
    signature = Signature((*parameters, Input("batch", "0", *MATRIX)), tuple(outputs))
    schedule = schedule_of(text, "w1 w2 x", "loss g1 g2" + " loss" * checks, signature)
    schedule = retyped(schedule, dict.fromkeys(schedule.buffers, MATRIX))
    schedule = replace(schedule, is_over_at_pause=text.endswith("PAUSE"))
    return whole(autopar.virtual_mesh(dp=2), schedule)


def test_each_gradient_is_used_once_the_next_reduction_is_on_its_way() -> None:
    program = WriteUpdates("bucket").apply(two_layers())
    (schedule,) = program.places
    assert str(schedule) == AFTER
    assert [item.kind for item in schedule.signature.outputs] == ["loss"] and schedule.outputs == ("loss",)


def test_a_backward_of_one_fragment_stays_behind_the_pause() -> None:
    """Where nothing is reduced: it gives nothing but gradients, and all that it reads of the forward is there before."""
    text = "RUN forward (w1, w2, x) -> (loss, h)\nPAUSE\nRUN backward (x, h) -> (g1, g2)\nFREE h"
    (found,) = WriteUpdates("bucket").apply(two_layers(text)).places
    assert str(found).startswith("RUN forward (w1, w2, x) -> (loss, h)\nPAUSE\nRUN backward (x, h) -> (g1, g2)\nFREE h\nUPDATE")


def test_at_the_end_all_are_updated_together() -> None:
    (schedule,) = WriteUpdates("end").apply(two_layers()).places
    assert [each for each in schedule.instructions if isinstance(each, Update)] == [Update(("w1", "w2"), ("g1", "g2"))]
    assert schedule.instructions[-1] == Free(("g1", "g2")) or set(schedule.instructions[-1].buffers) == {"g1", "g2"}


def test_a_pipeline_whose_model_checks_values_updates_when_it_knows_that_they_hold() -> None:
    text = BEFORE.replace("PAUSE\n", "").strip() + "\nPAUSE"
    for checks, number in ((True, 1), (False, 2)):
        (schedule,) = WriteUpdates("bucket").apply(two_layers(text, checks)).places
        assert sum(isinstance(each, Update) for each in schedule.instructions) == number
        assert isinstance(schedule.instructions[-1], Pause)


def test_without_an_optimizer_or_without_gradients_there_is_nothing_to_do() -> None:
    program = two_layers()
    assert WriteUpdates(None).apply(program) is program
    (schedule,) = program.places
    pairs = [pair for pair in zip(schedule.signature.outputs, schedule.outputs, strict=True) if pair[0].kind == "loss"]
    signature = replace(schedule.signature, outputs=tuple(item for item, _ in pairs))
    without = program.with_places([replace(schedule, outputs=("loss",), signature=signature)])
    assert WriteUpdates("bucket").apply(without) is without


@cache
def compiled(**axes: int) -> ScheduleProgram:
    mesh = autopar.virtual_mesh(**axes)
    return autopar.compile(small_gpt(), mesh, example_inputs=batch(0), backend="eager").compiled.schedule


@pytest.mark.parametrize("when", ["bucket", "end"])
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2}, {"tp": 2}], ids=str)
def test_a_compiled_step_updates_all_that_it_holds_and_is_proved(axes: dict[str, int], when: Any) -> None:
    plain = compiled(**axes)
    program = WriteUpdates(when).apply(plain)
    check_schedule_program(program)
    for before, after in zip(plain.places, program.places, strict=True):
        updates = [each for each in after.instructions if isinstance(each, Update)]
        held = [name for item, name in zip(after.signature.inputs, after.inputs, strict=True) if item.kind == "parameter"]
        assert sorted(name for each in updates for name in each.parameters) == sorted(held)
        assert len(updates) == 1 if when == "end" else 1 < len(updates) <= MAX_UPDATES + 1
        assert sorted(_work(before.instructions)) == sorted(_work(after.instructions))
        assert [each.action for each in before.spans] == [each.action for each in after.spans]


def _work(instructions: tuple[Instruction, ...]) -> list[str]:
    return [str(each) for each in instructions if isinstance(each, (Run, Launch, Wait))]


class Heavy(nn.Module):
    """Parameters that weigh more than what is saved of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize(("axes", "share"), [({"dp": 2}, 0.2), ({"tp": 2}, 0.5)], ids=str)
def test_gradients_need_not_live_together(axes: dict[str, int], share: float) -> None:
    """What a rank holds at most is less by most of the gradients, but for those of one bucket, which live together."""
    model = Heavy()
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=(torch.randn(2, 256),), backend="eager")
    (plain,) = parallel.compiled.schedules
    (updating,) = WriteUpdates("bucket").apply(parallel.compiled.schedule).places
    gradients = sum(
        _bytes(plain, name) for item, name in zip(plain.signature.outputs, plain.outputs, strict=True) if item.kind == "gradient"
    )
    assert peak_bytes(plain) - peak_bytes(updating) >= share * gradients


def _bytes(schedule: Schedule, name: str) -> int:
    shape, dtype = schedule.type_of(name) or ((), torch.float32)
    return torch.Size(shape).numel() * dtype.itemsize


def test_what_reads_a_transfer_waits_for_it() -> None:
    """A stage whose backward gives gradients and nothing else."""

    class Squares(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    model = Squares(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2), backend="eager", optimizer=torch.optim.SGD, num_microbatches=1)
    before = model[0].weight.detach().clone()
    parallel.train_step(torch.ones(2, 4, dtype=torch.float64))
    assert not torch.equal(before, model[0].weight)
