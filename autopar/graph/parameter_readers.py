"""What reads a parameter, and calls put between the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from torch.fx import Node

from autopar.graph.emit import Emitter
from autopar.ir.keys import PHASE, Phase
from autopar.ir.markers import held
from autopar.ir.program import Program
from autopar.ops.traits import CASTS


def with_copies(parameter: Node) -> list[Node]:
    """A parameter, and its casts and copies, which lie as it does."""
    found = [parameter]
    for value in found:
        found += [user for user in value.users if user.target is held or user.target in CASTS]
    return found


def read_through(program: Program, parameter: Node, make: Callable[[Emitter, Node, Phase], Node]) -> None:
    """Let all that reads a parameter, a cast or a copy of it read what `make` makes of this value instead, once in each phase."""
    values = with_copies(parameter)
    for value in values:
        readers = [user for user in value.users if user.op == "call_function" and user not in values]
        for phase in get_args(Phase):
            users = [user for user in readers if (PHASE.get(user) or "forward") == phase]
            if users:
                first = next(each for each in program.graph.nodes if each in users)
                made = make(Emitter(program.graph, first), value, phase)
                PHASE[made] = phase
                for user in users:
                    user.replace_input_with(value, made)
