"""Gives every call one stage: calls that several stages need are copied to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.keys import PHASE, STAGE, Phase
from autopar.ir.program import Form, Program
from autopar.pipeline.stage_rules import stages_of_calls


@dataclass(frozen=True)
class CopyToStages:
    """Give every call one stage: a call without one is copied to each stage that reads it, and so is a view that another stage reads.

    A copy is computed in the forward where the forward of its stage reads it, and kept; else in the backward. Of a value and
    its views one is sent, since the others are views again where they arrive.

    Reads: STAGE, PHASE of a LOCAL program. Writes: copies with both. Ensures: every call has a stage.
    """

    name: str = "copy to stages"

    def apply(self, program: Program) -> Program:
        assert program.form is Form.LOCAL
        if not any(node in STAGE for node in program.graph.nodes):
            return program  # nobody cut it into stages
        program = program.copy()
        for node, stages in stages_of_calls(program).items():
            _place(node, stages)
        program.graph.lint()
        return program


def _place(node: Node, stages: Mapping[int, Phase]) -> None:
    """`node` for its own stage, or the first that computes it, and a copy for each other one; all that read it are placed."""
    own = STAGE.get(node)
    first = own if own is not None else min(stages)
    for stage in sorted(stages.keys() - {first}):
        with node.graph.inserting_after(node):
            copy = node.graph.node_copy(node)
        copy.name = f"{node.name}_stage{stage}"
        for user in [user for user in node.users if (STAGE.get(user) if user.op == "call_function" else own or 0) == stage]:
            user.replace_input_with(node, copy)
        STAGE[copy], PHASE[copy] = stage, stages[stage]
    if own is None:
        STAGE[node], PHASE[node] = first, stages[first]
    elif not node.users:
        node.graph.erase_node(node)
