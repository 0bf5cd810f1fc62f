"""A `held` node behind each parameter that is computed with by a copy, so that the copy is made once a step and kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.emit import copy_origin
from autopar.ir.keys import PHASE
from autopar.ir.markers import held, save
from autopar.ir.program import Input, Program
from autopar.ops.traits import CASTS


@dataclass(frozen=True)
class HoldCopies:
    """Let forward and backward read parameters through one `held` node each, where the level of ZeRO that was asked for has copies.

    Where parameters may lie in parts as memory asks for it, the search decides by these nodes: a copy that lies whole is gathered once
    a step, one in parts takes no memory, and is gathered by each phase.

    At levels 1 and 2, and with a secondary shard, these are copies of what ops read: of the parameter where one reads it itself, of its
    cast where one reads that. At level 3 they are casts alone: what is not cast is gathered from the master each time. A frozen
    parameter has no optimizer state, and lies whole below level 3.

    Reads: PHASE, `save` nodes, freedom. Writes: `held` nodes with PHASE, SOURCE, in place of `save` nodes of casts.
    Ensures: of a parameter with a copy, casts and that copy alone read the parameter.
    """

    name: str = "hold copies"

    def apply(self, program: Program) -> Program:
        zero = program.freedom.zero
        if not program.freedom.shards_parameters:
            return program
        program, is_3 = program.copy(), zero is not None and zero.level == 3
        for item, node in list(program.named_inputs()):
            if item.kind == "parameter" and (item.requires_grad or is_3):
                for value in list(_copied(item, node, only_casts=is_3 and zero is not None and zero.secondary is None)):
                    _hold(program, value)
        return program


def _copied(item: Input, parameter: Node, only_casts: bool) -> Iterator[Node]:
    """Of what a copy is made: casts of the parameter, and itself where anything else reads it."""
    casts = [user for user in parameter.users if user.target in CASTS and user.meta["val"].dtype != item.dtype]
    if not only_casts and len(casts) < sum(user.op == "call_function" for user in parameter.users):
        yield parameter
    yield from (cast for cast in casts if PHASE.get(cast) == "forward" and any(user.op == "call_function" for user in cast.users))


def _hold(program: Program, value: Node) -> None:
    casts = [user for user in value.users if value.op == "placeholder" and user.target in CASTS]
    place = program.placeholders[-1] if value.op == "placeholder" else value
    with program.graph.inserting_after(place):
        copy = program.graph.call_function(held, (value,))
    copy.meta["val"] = value.meta["val"]
    copy_origin(value, copy)
    PHASE[copy] = "forward"
    for user in list(value.users):
        if user.target is save:
            user.replace_all_uses_with(copy)
            program.graph.erase_node(user)
        elif user.op == "call_function" and user not in casts and user is not copy:
            user.replace_input_with(value, copy)
