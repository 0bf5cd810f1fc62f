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
    read: dict[int, list[str]] = {}
    for item, node in program.named_inputs():
        if item.kind == "parameter" and held.get(item.name):
            for unit in {unit_of[reader] for reader in _readers(node, line.copied) if reader in unit_of}:
                read.setdefault(unit, []).append(item.name)
    reachable: list[set[int]] = [{0}]
    for unit in range(len(line.nodes)):
        before = reachable[-1] | ({stage + 1 for stage in reachable[-1]} if unit else set())
        allowed = set(range(num_stages)).intersection(*(held[name] for name in read.get(unit, ())))
        reachable.append(before & allowed)
        if not reachable[-1]:
            raise PlanError(_conflict({name: held[name] for name in read[unit]}, before))
    if num_stages - 1 not in reachable[-1]:
        raise PlanError(
            f"this call has work for {max(reachable[-1]) + 1} of the {num_stages} pipeline stages that the first capture placed parameters "
            "on: compile the model again for calls of this kind"
        )
    return _latest_starts(reachable[1:], num_stages)


def _conflict(held: Held, possible: set[int]) -> str:
    """Why the parameters that one unit reads, `held` where they are, cannot stay there; the unit may be on the `possible` stages."""
    where = {name: f"{name!r} with stage {' and '.join(map(str, stages))} of the pipeline" for name, stages in held.items()}
    alone = [name for name, stages in held.items() if possible.isdisjoint(stages)]
    if not alone or not set.intersection(*map(set, held.values())):
        left, reads = " and ".join(where.values()), "reads them in one op"
    else:
        is_behind = min(possible) > max(held[alone[0]])
        bound = f"behind what stage {min(possible)} holds" if is_behind else f"where stage {max(possible)} is the last that can be"
        left, reads = where[alone[0]], f"reads it {bound}"
    remedy = "compile the model again for calls of this kind, or let the first call be one of them"
    return f"the first capture left {left}; this call {reads}: {remedy}"


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
