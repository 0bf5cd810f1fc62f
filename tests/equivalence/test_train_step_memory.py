"""A rank of `train_step` holds at most what its schedule says, byte for byte, and less than in a plain step: gradients go once used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.schedule_memory import peak_bytes
from autopar.runtime.execute.call import Call
from autopar.runtime.verify.timeline import bytes_of

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
    call, _ = parallel.start((), {"x": x}, updates=True)
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
