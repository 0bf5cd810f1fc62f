"""What the actions and transfers of a pipeline cost: seconds for the clock, bytes for the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.rank_memory import RankMemory, Sizes
from autopar.cost.schedule_memory import schedule_memory
from autopar.ir.actions import Action, Edge, Transfer, chain
from autopar.ir.instructions import Run, Update
from autopar.ir.lifetimes import with_frees
from autopar.pipeline.expand import saved_by
from autopar.pipeline.schedule_program import ScheduleProgram


@dataclass(frozen=True)
class StageCost:
    """One stage and one microbatch, on the device that holds the stage.

    `backward_seconds` is the undivided backward; by default the sum of its halves. A stage whose inputs take no gradient (the first)
    has `input_gradient_seconds` near 0.
    """

    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    backward_seconds: float | None = None
    # Once a step: the sum of the parameters' gradients over the replicas.
    reduce_seconds: float = 0.0
    # What a forward keeps for its backward (its inputs included), and how much of that the weight gradient still needs after I.
    saved_bytes: float = 0.0
    weight_saved_bytes: float = 0.0
    # What an action needs besides while it runs.
    working_bytes: float = 0.0
    # What the stage holds all the time: parameters, gradients, optimizer state.
    held_bytes: float = 0.0

    def seconds(self, kind: str) -> float:
        """Of an action of `kind`: F, B, I or W."""
        if kind == "F":
            return self.forward_seconds
        if kind == "I":
            return self.input_gradient_seconds
        if kind == "W":
            return self.weight_gradient_seconds
        if self.backward_seconds is not None:
            return self.backward_seconds
        return self.input_gradient_seconds + self.weight_gradient_seconds

    def freed_bytes(self, kind: str) -> float:
        """Of what the forward saved, what is gone at the end of an action of `kind`."""
        freed = {"F": 0.0, "B": self.saved_bytes, "I": self.saved_bytes - self.weight_saved_bytes, "W": self.weight_saved_bytes}
        return freed[kind]


@dataclass(frozen=True)
class EdgeCost:
    """One value on its way from stage to stage; its gradient costs the same on the way back."""

    seconds: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class PipelineCost:
    """Prices of all stages and of all edges between them."""

    stages: tuple[StageCost, ...]
    edges: Mapping[Edge, EdgeCost]

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_seconds: float = 1.0,
        input_gradient_seconds: float = 1.0,
        weight_gradient_seconds: float = 1.0,
        communication_seconds: float = 0.0,
        saved_bytes: float = 0.0,
        weight_saved_bytes: float = 0.0,
    ) -> PipelineCost:
        """Equal stages in a chain."""
        stage = StageCost(
            forward_seconds,
            input_gradient_seconds,
            weight_gradient_seconds,
            saved_bytes=saved_bytes,
            weight_saved_bytes=weight_saved_bytes,
        )
        return cls((stage,) * num_stages, {edge: EdgeCost(communication_seconds) for edge in chain(num_stages)})

    def action_seconds(self, action: Action) -> float:
        return self.stages[action.stage].seconds(action.kind)

    def transfer(self, transfer: Transfer) -> EdgeCost:
        """The price of the edge that `transfer` goes along, either way."""
        ends = (min(transfer.source, transfer.target), max(transfer.source, transfer.target))
        for has_gradient in (True, False):
            price = self.edges.get(Edge(*ends, has_gradient))
            if price is not None:
                return price
        return EdgeCost()

    def buffer_bytes(self, program: ScheduleProgram) -> dict[str, float]:
        """By name the bytes of the buffers of a grid."""
        found = {name: self.transfer(transfer).bytes for name, transfer in program.transfers.items()}
        for number, stage in enumerate(self.stages):
            saved = (stage.freed_bytes("I"), stage.freed_bytes("W"))
            for microbatch in range(program.order.num_microbatches):
                found |= zip(saved_by(number, microbatch), saved, strict=True)
        return found


def grid_memory(program: ScheduleProgram, cost: PipelineCost) -> tuple[RankMemory, ...]:
    """The memory of every rank of a grid over its instructions, each with what frees the buffers that nothing reads after it."""
    buffer_bytes = cost.buffer_bytes(program)

    def working_bytes(run: Run | Update) -> float:
        action = program.actions.get(run.fragment) if isinstance(run, Run) else None
        return cost.stages[action.stage].working_bytes if isinstance(action, Action) else 0.0

    found: list[RankMemory] = []
    for place, schedule in enumerate(program.places):
        held = sum(cost.stages[stage].held_bytes for stage in program.stages_of(place))
        sizes = Sizes(buffer_bytes.__getitem__, working_bytes, held, arrival="launch")
        found.append(schedule_memory(schedule, sizes, with_frees(schedule.instructions, ())))
    return tuple(found)
