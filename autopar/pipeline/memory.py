"""Bytes and live microbatches of a rank, instruction by instruction. They follow from its order alone: no clock is needed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.pipeline.actions import Action, Edge
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.program import Compute, PipelineProgram, Receive, Send, Transfer, Wait, receives_of, sends_of


class MemoryStep(NamedTuple):
    """Bytes while the instruction at `position` runs and after it, and microbatches (of any stage) that hold saved values then."""

    position: int
    during_bytes: float
    after_bytes: float
    live_microbatches: int


@dataclass(frozen=True)
class RankMemory:
    steps: tuple[MemoryStep, ...]
    held_bytes: float

    @property
    def peak_bytes(self) -> float:
        return max((step.during_bytes for step in self.steps), default=self.held_bytes)

    @property
    def peak_live_microbatches(self) -> int:
        """A microbatch counts once for each of the rank's stages, from its forward to the end of its B or W."""
        return max((step.live_microbatches for step in self.steps), default=0)


def rank_memory(program: PipelineProgram, rank: int, cost: PipelineCost) -> RankMemory:
    """The memory of one rank over its instructions; steps are given for those that change it."""
    return _Walk(program, rank, cost).run()


@dataclass
class _Walk:
    program: PipelineProgram
    rank: int
    cost: PipelineCost
    bytes: float = 0.0
    buffers: dict[Transfer, float] = field(default_factory=dict[Transfer, float])
    by_stage: dict[int, list[Edge]] = field(default_factory=lambda: defaultdict(list))

    def run(self) -> RankMemory:
        for edge in self.program.edges:
            self.by_stage[edge.source].append(edge)
            self.by_stage[edge.target].append(edge)
        stages = [stage for stage, rank in enumerate(self.program.stages) if rank == self.rank]
        held = self.bytes = sum(self.cost.stages[stage].held_bytes for stage in stages)
        steps: list[MemoryStep] = []
        live = 0
        for position, each in enumerate(self.program.ranks[self.rank]):
            if isinstance(each, Compute):
                live += each.action.kind == "F"
                steps.append(self.compute(position, each.action, live))
                live -= each.action.kind in ("B", "W")
            elif isinstance(each, Receive):
                self.allocate(each.transfer)
                steps.append(MemoryStep(position, self.bytes, self.bytes, live))
            elif isinstance(each, Wait) and isinstance(each.launched, Send):
                before = self.bytes
                self.free(each.launched.transfer)
                steps.append(MemoryStep(position, before, self.bytes, live))
        return RankMemory(tuple(steps), held)

    def compute(self, position: int, action: Action, live: int) -> MemoryStep:
        stage = self.cost.stages[action.stage]
        if action.kind == "F":
            self.bytes += stage.saved_bytes
        for transfer in sends_of(action, self.by_stage[action.stage]):
            self.allocate(transfer)
        during = self.bytes + stage.working_bytes
        self.bytes -= stage.freed_bytes(action.kind)
        for transfer in receives_of(action, self.by_stage[action.stage]):
            self.free(transfer)
        return MemoryStep(position, during, self.bytes, live)

    def allocate(self, transfer: Transfer) -> None:
        """A value between two stages of one rank has a buffer too, from the action that makes it to the one that reads it."""
        self.free(transfer)
        self.buffers[transfer] = self.cost.transfer(transfer).bytes
        self.bytes += self.buffers[transfer]

    def free(self, transfer: Transfer) -> None:
        self.bytes -= self.buffers.pop(transfer, 0.0)
