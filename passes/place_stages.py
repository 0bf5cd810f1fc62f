"""Where the forward is cut into the stages of a pipeline, by cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.keys import PHASE, STAGE
from autopar.pipeline.assign import assign_stages
from autopar.program import Program


@dataclass(frozen=True)
class StageDecision:
    """`stages` are by name of a forward node."""

    stages: Mapping[str, int]
    num_stages: int

    def __str__(self) -> str:
        return f"{self.num_stages} stages"


@dataclass(frozen=True)
class PlaceStages:
    """Cut the forward into `num_stages` contiguous stages so that the slowest one is as fast as can be.

    Reads: PHASE, STRATEGY, SHARDING. Writes: STAGE of every call but those that each stage makes for itself.
    Ensures: activations flow to later stages, gradients to earlier ones.
    """

    num_stages: int
    name: str = "place stages"

    def decide(self, program: Program) -> StageDecision:
        calls = [node for node in program.graph.nodes if node.op == "call_function" and PHASE[node] == "forward"]
        stages = {node.name: index * self.num_stages // len(calls) for index, node in enumerate(calls)}
        return StageDecision(stages, self.num_stages)

    def apply(self, program: Program, decision: StageDecision) -> Program:
        program = program.copy()
        forward = {node: decision.stages[node.name] for node in program.graph.nodes if node.name in decision.stages}
        for node, stage in assign_stages(program, forward, decision.num_stages).items():
            STAGE[node] = stage
        return program
