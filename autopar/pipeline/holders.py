"""Which stages hold each parameter, and which cuts into stages leave all parameters where the first capture placed them."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from autopar.errors import PlanError
from autopar.ir.keys import PHASE, STAGE
from autopar.ir.program import Program
from autopar.pipeline.placement_units import ProgramLine

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
    reachable: list[set[int]] = [{0}]
    for unit in range(len(line.nodes)):
        before = reachable[-1] | ({stage + 1 for stage in reachable[-1]} if unit else set())
        reachable.append(before.intersection(allowed.get(unit, range(num_stages))))
        if not reachable[-1]:
            raise PlanError(
                f"the first capture left {names[unit]!r} with stage {' and '.join(map(str, held[names[unit]]))} of the pipeline; this call "
                f"reads it where stage {max(reachable[-2])} is the last that can be: compile the model again for calls of this kind"
            )
    if num_stages - 1 not in reachable[-1]:
        raise PlanError(
            f"this call has work for {max(reachable[-1]) + 1} of the {num_stages} pipeline stages that the first capture placed parameters "
            "on: compile the model again for calls of this kind"
        )
    return _latest_starts(reachable[1:], num_stages)


def _latest_starts(reachable: list[set[int]], num_stages: int) -> tuple[int, ...]:
    """The first unit of each stage, as late as can be; `reachable` are by unit the stages that it may be on."""
    starts, stage = list[int](), num_stages - 1
    for unit in range(len(reachable) - 1, 0, -1):
        if stage - 1 in reachable[unit - 1]:
            starts.append(unit)
            stage -= 1
    return (0, *reversed(starts))


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
