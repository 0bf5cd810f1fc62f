"""The stages that hold each parameter, and the cuts that leave it with them: what the first capture placed stays."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from autopar.errors import PlanError
from autopar.keys import PHASE, STAGE
from autopar.pipeline.line import ProgramLine
from autopar.program import Program

# By parameter the stages that read it.
Held = Mapping[str, tuple[int, ...]]


def holders_of(program: Program) -> dict[str, tuple[int, ...]]:
    """The stages whose calls read each parameter of a program that is cut into stages."""
    found: dict[str, tuple[int, ...]] = {}
    everywhere = frozenset(node for node in program.graph.nodes if node.op == "call_function" and node not in STAGE)
    for item, node in program.named_inputs():
        if item.kind == "parameter":
            stages = {STAGE[reader] for reader in _readers(node, everywhere)}
            found[item.name] = tuple(sorted(stages))
    return found


def starts_where(line: ProgramLine, program: Program, held: Held, num_stages: int) -> tuple[int, ...]:
    """The first unit of each stage when every parameter is read by a stage that holds it. Raises `PlanError` where that cannot be."""
    unit_of = {node: number for number, nodes in enumerate(line.nodes) for node in nodes if PHASE.get(node) == "forward"}
    allowed: dict[int, tuple[int, ...]] = {}
    names: dict[int, str] = {}
    for item, node in program.named_inputs():
        stages = held.get(item.name, ()) if item.kind == "parameter" else ()
        for unit in {unit_of[reader] for reader in _readers(node, line.copied) if reader in unit_of} if stages else ():
            allowed[unit] = tuple(stage for stage in allowed.get(unit, stages) if stage in stages)
            names[unit] = item.name
    starts, now = [0], 0
    for unit in sorted(allowed):
        stage = next((stage for stage in allowed[unit] if stage >= now), None)
        if stage is None or stage > now + 1:
            raise PlanError(
                f"the first capture left {names[unit]!r} with stage {' and '.join(map(str, held[names[unit]]))} of the pipeline; this call "
                f"reads it after parameters of stage {now}: compile the model again for calls of this kind"
            )
        if stage > now:
            starts.append(unit)
        now = stage
    if len(starts) < num_stages:
        raise PlanError(
            f"this call reads no parameter of the last {num_stages - len(starts)} of {num_stages} pipeline stages that the first capture "
            "placed: compile the model again for calls of this kind"
        )
    return tuple(starts)


def _readers(parameter: Node, everywhere: frozenset[Node]) -> set[Node]:
    """The calls that read a parameter, be it through calls that every stage makes for itself."""
    found: set[Node] = set()
    stack = list(parameter.users)
    while stack:
        user = stack.pop()
        if user.op == "call_function" and user not in found:
            found.add(user)
            stack += list(user.users) if user in everywhere else []
    return found - everywhere
