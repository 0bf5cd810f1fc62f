"""A rank of `train_step` holds at most what its schedule says, byte for byte, and less than in a plain step: gradients go once used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.rank_memory import MemoryStep
from autopar.cost.schedule_memory import peak_bytes, schedule_memory
from autopar.ir.schedule import Schedule
from autopar.runtime.execute.call import Call
from autopar.runtime.verify.timeline import bytes_of, measured

WIDTH, NUM_LAYERS = 256, 12


class Heavy(nn.Module):
    """Parameters that weigh more than what is saved of a few samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def watched(call: Call) -> dict[int, int]:
    """By rank what it holds at most after any instruction; filled while `call` runs."""
    most = dict.fromkeys(call.states, 0)
    for rank, state in call.states.items():

        def look(number: int, is_over: bool, rank: int = rank, state: Any = state) -> None:
            if is_over:
                most[rank] = max(most[rank], bytes_of(state))

        state.watch = look
    return most


@pytest.mark.parametrize(("axes", "saved"), [({"dp": 2}, 0.2), ({"tp": 2}, 0.7), ({"pp": 2}, 0.0)], ids=str)
def test_a_step_holds_what_is_predicted(axes: dict[str, int], saved: float) -> None:
    """Over dp the first of four buckets has half of the gradients of so small a model, and they live together."""
    torch.manual_seed(0)
    model, x = Heavy(), torch.randn(8, WIDTH)
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=(x,), backend="eager", optimizer=torch.optim.SGD)
    compiled = parallel.compiled
    assert compiled.updating is not None
    call, *_ = parallel.start((), {"x": x}, updates=True)
    held = watched(call)
    assert parallel.optimizer is not None
    parallel._trainer.run(call, parallel, lambda: "")
    predicted = {rank: peak_bytes(compiled.updating.schedule_of(rank)) for rank in call.states}
    assert held == predicted
    plain = {rank: peak_bytes(compiled.schedule_of(rank)) for rank in call.states}
    for rank in call.states:
        schedule = compiled.schedule_of(rank)
        gradients = sum(
            torch.Size(schedule.buffers[name].type[0]).numel() * 4
            for item, name in zip(schedule.signature.outputs, schedule.outputs, strict=True)
            if item.kind == "gradient"
        )
        assert plain[rank] - held[rank] >= saved * gradients, (plain, held, gradients)
    reference(x).backward()
    torch.optim.SGD(reference.parameters()).step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def peak_of(schedule: Schedule) -> MemoryStep:
    return max(schedule_memory(schedule).steps, key=lambda step: step.during_bytes)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_what_a_step_saves_are_the_gradients_that_need_not_live_together(axes: dict[str, int]) -> None:
    """Both ways to train are measured, and each holds what was predicted of it, to the byte; the difference is the gradients that the one
    holds at its peak and the other does not, but for what else is there: activations of eight samples."""
    x = torch.randn(8, WIDTH)
    mesh = autopar.virtual_mesh(**axes)
    parallel = autopar.compile(Heavy(), mesh, example_inputs=(x,), backend="eager", optimizer=torch.optim.SGD, num_microbatches=1)
    assert parallel.compiled.updating is not None
    loop, *_ = parallel.start((), {"x": x})
    with torch.no_grad():
        plain = measured(loop).peak_bytes
    call, *_ = parallel.start((), {"x": x}, updates=True)
    held = watched(call)
    assert parallel.optimizer is not None
    parallel._trainer.run(call, parallel, lambda: "")
    for rank in call.states:
        whole, step = peak_of(parallel.compiled.schedule_of(rank)), peak_of(parallel.compiled.updating.schedule_of(rank))
        assert (plain[rank], held[rank]) == (whole.during_bytes, step.during_bytes)
        gradients = whole.kinds["gradients"] - step.kinds["gradients"]
        assert gradients >= 0.7 * whole.kinds["gradients"]
        activations = (NUM_LAYERS + 2) * x.nbytes
        assert abs(plain[rank] - held[rank] - gradients) <= activations < 0.1 * gradients, (plain, held, gradients)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_gradients_that_are_held_low_take_half(axes: dict[str, int]) -> None:
    """With clipping all of them wait for the norm."""
    x, peaks = torch.randn(8, WIDTH), []
    for grad in (torch.bfloat16, torch.float32):
        parallel = autopar.compile(
            Heavy(),
            autopar.virtual_mesh(**axes),
            example_inputs=(x,),
            backend="eager",
            optimizer=torch.optim.SGD,
            precision=autopar.MixedPrecision(grad=grad),
            train_step=autopar.TrainStep(clip_grad_norm=1.0),
        )
        call, *_ = parallel.start((), {"x": x}, updates=True)
        held = watched(call)
        assert parallel.optimizer is not None and parallel.compiled.updating is not None
        parallel._trainer.run(call, parallel, lambda: "")
        assert held == {rank: peak_bytes(parallel.compiled.updating.schedule_of(rank)) for rank in call.states}
        peaks.append(held)
        gradients = NUM_LAYERS * (WIDTH + 1) * WIDTH * grad.itemsize // axes.get("pp", 1)
        assert parallel.summary()["memory"]["gradients"] == gradients
    for rank, low in peaks[0].items():
        assert peaks[1][rank] - low >= 0.9 * gradients / 2, peaks
