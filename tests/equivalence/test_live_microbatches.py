"""How many microbatches a rank holds on a real run, and the bytes of what it saves: as the order and the placement say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compiled import Compiled
from autopar.keys import PHASE, STAGE
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.expand import expand
from autopar.pipeline.memory import rank_memory
from autopar.pipeline.schedules import generate
from autopar.schedule import microbatch_of
from tests.pipelined import compiled
from tests.zoo import Case

WIDTH, NUMBER = 8, 6


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

    def __init__(self, buffers: dict[str, Tensor], stage_of: dict[str, int]) -> None:
        super().__init__(buffers)
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
        held = {name: tensor for name, tensor in self.items() if "@" in name and name.partition("@")[0] in self.stage_of}
        live = {(self.stage_of[name.partition("@")[0]], microbatch_of(name)) for name in held}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held.values()}
        self.most_live = max(self.most_live, len(live))
        self.most_bytes = max(self.most_bytes, sum(size for address, size in storages.items() if address not in self.given))


def stages_of(compiled: Compiled) -> dict[str, int]:
    """By name of a forward value the stage that makes it."""
    program = compiled.steps[-1].program
    calls = [node for node in program.graph.nodes if node.op == "call_function" and PHASE[node] == "forward"]
    return {node.name: STAGE[node] for node in calls}


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("1f1b", 4), ("gpipe", 2), ("zb-h2", 4), ("interleaved", 2), ("zb-v", 2)])
def test_as_many_microbatches_are_alive_as_the_order_says(schedule: str, num_ranks: int) -> None:
    torch.manual_seed(0)
    case = Case(Chain(), {"x": torch.randn(2 * NUMBER, WIDTH)})
    parallel = compiled(case, {"pp": num_ranks}, NUMBER, schedule)
    order = generate(schedule, num_ranks, NUMBER)
    stage_of = stages_of(parallel.compiled)
    call, _ = parallel.start((), case.batch)
    for rank, state in call.states.items():
        mine = {name: stage for name, stage in stage_of.items() if order.stages[stage] == rank}
        state.buffers = Watched({}, mine)
    call._fill(list(call.signature.inputs))
    for state in call.states.values():
        state.buffers = Watched(dict(state.buffers), state.buffers.stage_of)
    call._run()
    program = expand(order)
    costs = PipelineCost.uniform(order.num_stages)
    for rank, state in call.states.items():
        wanted = rank_memory(program, rank, costs).peak_live_microbatches
        print(rank, state.buffers.most_live, wanted, state.buffers.most_bytes)
        step = next(each for each in parallel.compiled.steps if each.name == "place stages")
        print([ (s.saved_bytes, s.received_bytes, s.live_microbatches, s.num_units) for s in step.decision.placement.stages])
        assert state.buffers.most_live == wanted
        if schedule == "1f1b":
            assert wanted == num_ranks - rank
