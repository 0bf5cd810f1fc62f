"""What several stages compute for themselves becomes a call of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.microbatches import is_summed_later
from autopar.ir.arguments import node_at
from autopar.ir.keys import PHASE, SHARDING, STAGE
from autopar.ir.program import Form, Program
from autopar.ops.traits import WHOLE_VIEWS

aten = torch.ops.aten


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
        for node in reversed(list(program.graph.nodes)):
            if node.op == "call_function" and (node not in STAGE or _is_view(node)):
                _place(node)
        program.graph.lint()
        return program


def _is_view(node: Node) -> bool:
    """Whether `node` is a view that may be made anew. One of a parameter's gradient stays: its sum is sent, once a step."""
    is_gradient = node in SHARDING and any(is_summed_later(each) for each in SHARDING[node])
    return node.target in WHOLE_VIEWS and not is_gradient and node_at(node, 0).op == "call_function"


def _place(node: Node) -> None:
    """`node` for its own stage, or the first that reads it, and a copy for each other one that does. What only the caller reads is
    the first stage's."""
    own = STAGE.get(node)
    readers: dict[int, list[Node]] = {}
    for user in node.users:
        stage = STAGE.get(user)  # none where the caller reads it
        readers.setdefault(stage if stage is not None else own or 0, []).append(user)
    first = own if own is not None else min(readers, default=0)
    for stage in sorted(set(readers) - {first}):
        with node.graph.inserting_after(node):
            copy = node.graph.node_copy(node)
        copy.name = f"{node.name}_stage{stage}"
        for user in readers[stage]:
            user.replace_input_with(node, copy)
        _settle(copy, stage)
    if own is None:
        _settle(node, first)
    elif not node.users:
        node.graph.erase_node(node)


def _settle(node: Node, stage: int) -> None:
    STAGE[node] = stage
    phases = {PHASE.get(user) for user in node.users if user.op == "call_function"}
    PHASE[node] = "forward" if "forward" in phases or not phases else "backward"
