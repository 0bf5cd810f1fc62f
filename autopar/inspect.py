"""Looking into a compiled program: what was decided and why, what it costs, and how it looked after any pass."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from autopar import printing
from autopar.compiled import Compiled
from autopar.errors import AutoparError
from autopar.explain import explain
from autopar.keys import ORIGIN, SOURCE
from autopar.printing import op_name
from autopar.program import Form, Program
from autopar.summary import summary
from autopar.what_if import what_if
from autopar.why import why

__all__ = ["diff", "explain", "print_program", "print_schedule", "summary", "what_if", "why"]


def print_program(compiled: Compiled, after: str | None = None, rank: int = 0) -> str:
    """The program after the pass `after` as text; without, `rank`'s LOCAL program and its schedule.

    Every rank of a dp × tp mesh runs one program; `rank` says with which coordinates.
    Raises `AutoparError` for a pass that did not run or a rank that is not on the mesh.
    """
    if after is not None:
        return printing.print_program(_after(compiled, after))
    mesh = compiled.local.mesh
    if not 0 <= rank < mesh.size:
        raise AutoparError(f"rank {rank} is not on the mesh ({mesh}): ranks are 0 to {mesh.size - 1}")
    coordinates = ", ".join(f"{axis} {index}" for axis, index in mesh.coordinates(rank).items())
    return "\n\n".join((f"rank {rank} at {coordinates}", printing.print_program(compiled.local), print_schedule(compiled)))


def print_schedule(compiled: Compiled) -> str:
    """The instructions, numbered as errors number them, with the user's modules that each fragment computes."""
    lines = [f"schedule: {len(compiled.schedule.instructions)} instructions, {len(compiled.schedule.fragments)} fragments"]
    places = {node.name: SOURCE[node].module for node in compiled.local.graph.nodes if node in SOURCE}
    previous = ""
    for number, instruction in enumerate(compiled.schedule.instructions):
        outputs = getattr(instruction, "outputs", ())
        module = next((places[name] for name in outputs if places.get(name)), "")
        note = f"   # {module}" if module and module != previous else ""
        previous = module or previous
        lines.append(f"  {number:5}  {instruction}{note}")
    return "\n".join(lines)


def diff(compiled: Compiled, before: str, after: str) -> str:
    """What changed between two passes, as a unified diff; values keep their names from form to form."""
    first, second = _after(compiled, before), _after(compiled, after)
    header = f"after {before!r} → after {after!r}: {_change(first, second)}"
    return f"{header}\n{printing.diff(first, second)}"


def _change(first: Program, second: Program) -> str:
    """What was added and removed, by op, most frequent first."""
    counts: dict[str, int] = {}
    for program, sign in ((first, -1), (second, 1)):
        for node in _calls(program):
            counts[op_name(node.target)] = counts.get(op_name(node.target), 0) + sign
    changed = sorted((entry for entry in counts.items() if entry[1]), key=lambda entry: (-abs(entry[1]), entry[0]))
    return ", ".join(f"{count:+} {name}" for name, count in changed[:8]) + (", …" if len(changed) > 8 else "") or "the same ops"


def _calls(program: Program) -> Iterator[Node]:
    """In LOCAL form what stands for GLOBAL ops and collectives alike."""
    local = program.form is Form.LOCAL
    return (
        node for node in program.graph.nodes if node.op == "call_function" and (not local or node in ORIGIN or printing.moves_data(node))
    )


def _after(compiled: Compiled, name: str) -> Program:
    """The program after the last pass of that name."""
    for step in reversed(compiled.steps):
        if step.name == name:
            return step.program
    raise AutoparError(f"no pass {name!r} ran; these did: {', '.join(step.name for step in compiled.steps)}")
