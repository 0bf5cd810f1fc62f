"""What several stages compute for themselves becomes a call of each."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.keys import PHASE, STAGE
from autopar.program import Form, Program


@dataclass(frozen=True)
class CopyToStages:
    """Give every call one stage: a call without one is copied to each stage that reads it.

    A copy is computed in the forward where the forward of its stage reads it, and kept; else in the backward.

    Reads: STAGE, PHASE of a LOCAL program. Writes: copies with both. Ensures: every call has a stage.
    """

    name: str = "copy to stages"

    def apply(self, program: Program) -> Program:
        assert program.form is Form.LOCAL
        program = program.copy()
        for node in reversed(list(program.graph.nodes)):
            if node.op == "call_function" and node not in STAGE:
                _place(node)
        program.graph.lint()
        return program


def _place(node: Node) -> None:
    """`node` for the first stage that reads it, and a copy for each other one. What only the caller reads is the first stage's."""
    readers: dict[int, list[Node]] = {}
    for user in node.users:
        readers.setdefault(STAGE.get(user) or 0, []).append(user)
    first, *others = sorted(readers) or [0]
    for stage in others:
        with node.graph.inserting_after(node):
            copy = node.graph.node_copy(node)
        copy.name = f"{node.name}_stage{stage}"
        for user in readers[stage]:
            user.replace_input_with(node, copy)
        _settle(copy, stage)
    _settle(node, first)


def _settle(node: Node, stage: int) -> None:
    STAGE[node] = stage
    phases = {PHASE.get(user) for user in node.users if user.op == "call_function"}
    PHASE[node] = "forward" if "forward" in phases or not phases else "backward"
