"""How many microbatches a rank holds on a real run, and the bytes of what it saves: as the order and the placement say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.driver.compiled import Compiled
from autopar.ir.keys import PHASE, STAGE
from autopar.ir.schedule import Schedule
from autopar.pipeline.cost import PipelineCost, grid_memory
from autopar.pipeline.expand import expand
from autopar.pipeline.schedules import generate
from tests.support.models.pipelined import in_stages
from tests.support.models.zoo import Case

WIDTH, SAMPLES, NUMBER = 8, 2, 6


class Chain(nn.Module):
    """Eight equal layers: each stage has some, whatever the number of stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


class Watched(dict[str, Tensor]):
    """The buffers of a rank; after whatever writes one, how many microbatches it holds forward values of, and how large they are.

    A microbatch counts once for each of the rank's stages. Views of parameters count nothing, several views of a value once.
    """

    def __init__(self, buffers: dict[str, Tensor], schedule: Schedule, stage_of: dict[str, int]) -> None:
        super().__init__(buffers)
        self.known = schedule.buffers
        self.stage_of = stage_of
        self.given = {tensor.untyped_storage().data_ptr() for tensor in buffers.values()}
        self.most_live, self.most_bytes = 0, 0

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        super().__setitem__(name, tensor)
        self.look()

    def update(self, entries: Any = (), /, **named: Tensor) -> None:
        super().update(entries, **named)
        self.look()

    def look(self) -> None:
        places = {name: (self.known[name].value, self.known[name].microbatch) for name in self if name in self.known}
        held = {name: self[name] for name, (value, number) in places.items() if number is not None and value in self.stage_of}
        live = {(self.stage_of[places[name][0]], places[name][1]) for name in held}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held.values()}
        self.most_live = max(self.most_live, len(live))
        self.most_bytes = max(self.most_bytes, sum(size for address, size in storages.items() if address not in self.given))


def stages_of(compiled: Compiled) -> dict[str, int]:
    """By name of a forward value the stage that makes it."""
    program = compiled.steps[-1].program
    calls = [node for node in program.graph.nodes if node.op == "call_function" and PHASE[node] == "forward"]
    return {node.name: STAGE[node] for node in calls}


CASES = (("1f1b", 2), ("1f1b", 4), ("gpipe", 2), ("zb-h2", 4), ("interleaved", 2), ("zb-v", 2))


@pytest.mark.parametrize(("schedule", "num_ranks"), CASES)
def test_as_many_microbatches_are_alive_as_the_order_says(schedule: str, num_ranks: int) -> None:
    torch.manual_seed(0)
    case = Case(Chain(), {"x": torch.randn(SAMPLES * NUMBER, WIDTH)})
    parallel = in_stages(case, {"pp": num_ranks}, NUMBER, schedule)
    order = generate(schedule, num_ranks, NUMBER)
    stage_of = stages_of(parallel.compiled)
    placement = next(step.decision.placement for step in parallel.compiled.steps if step.name == "place stages")
    call, *_ = parallel.start((), case.batch)
    call._fill_parameters()
    call._fill([item for item in call.signature.inputs if item.kind != "parameter"])
    watched = []
    for rank, state in call.states.items():
        mine = {name: stage for name, stage in stage_of.items() if order.stages[stage] == rank}
        state.buffers = Watched(state.buffers, call.schedules[rank], mine)
        watched.append(state.buffers)
    call._run()
    for rank, found in enumerate(watched):
        simulated = grid_memory(expand(order), PipelineCost.uniform(order.num_stages))[rank].peak_live_microbatches
        assert found.most_live == simulated
        if schedule == "1f1b":
            assert found.most_live == num_ranks - rank
        if schedule in ("1f1b", "gpipe"):  # one stage a rank, freed in one go
            stage = placement.stages[rank]
            assert stage.live_microbatches == found.most_live and stage.saved_bytes >= SAMPLES * WIDTH * 4
            # The last one's loss is there for a moment: four bytes.
            assert 0 <= found.most_bytes - found.most_live * stage.saved_bytes <= 4
