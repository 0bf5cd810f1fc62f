"""Looking into a compiled program: what was decided and why, what it costs, and how it looked after any pass."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx import Node

from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError
from autopar.ir import printing
from autopar.ir.actions import PipelineSchedule
from autopar.ir.keys import ORIGIN, SOURCE
from autopar.ir.printing import op_name
from autopar.ir.program import Form, Program
from autopar.ir.schedule import Schedule
from autopar.reports.explain import explain
from autopar.reports.summary import summary
from autopar.reports.what_if import what_if
from autopar.reports.why import why

__all__ = ["diff", "explain", "print_program", "print_schedule", "summary", "what_if", "why"]


def print_program(compiled: Compiled, after: str | None = None, rank: int = 0) -> str:
    """The program after the pass `after` as text; without, `rank`'s LOCAL program and its schedule.

    Every rank of a dp × tp mesh runs one program; `rank` says with which coordinates. Of a pipeline a rank has the calls of its
    stages, and its row of the grid says in which order.
    Raises `AutoparError` for a pass that did not run or a rank that is not on the mesh.
    """
    if after is not None:
        written = next((step.program for step in reversed(compiled.schedule_steps) if step.name == after), None)
        return str(written) if written is not None else printing.print_program(_after(compiled, after))
    mesh = compiled.local.mesh.ranks
    if not 0 <= rank < mesh.size:
        raise AutoparError(f"rank {rank} is not on the mesh ({mesh}): ranks are 0 to {mesh.size - 1}")
    coordinates = ", ".join(f"{axis} {index}" for axis, index in mesh.coordinates(rank).items())
    place = mesh.index(rank, mesh.parts("pp"))
    order, stages = compiled.order, None
    parts = [f"rank {rank} at {coordinates}"]
    if order.num_ranks > 1:
        stages = {stage for stage, home in enumerate(order.stages) if home == place}
        parts.append("\n".join(_row(order, place)))
    program = printing.print_program(_local(compiled), stages=stages)
    return "\n\n".join((*parts, program, print_schedule(compiled, rank)))


def _row(order: PipelineSchedule, place: int) -> Iterator[str]:
    """The line of one rank in the grid, with the line above it that names the schedule."""
    header, *lines = str(order).splitlines()
    yield header
    yield from (line for line in lines if re.match(rf"rank +{place} ", line))


def print_schedule(compiled: Compiled, rank: int = 0) -> str:
    """The instructions, numbered as errors number them, with the user's modules that each fragment computes.

    Of a pipeline they are grouped: a comment before those of each action (`# 0F2`), of what goes on between two, and at the ends.
    """
    schedule = compiled.schedule_of(rank)
    lines = [f"schedule: {len(schedule.instructions)} instructions, {len(schedule.fragments)} fragments"]
    places = {node.name: SOURCE[node].module for node in _local(compiled).graph.nodes if node in SOURCE}
    headings = _headings(schedule)
    previous = ""
    for number, instruction in enumerate(schedule.instructions):
        lines += [f"  # {heading}" for heading in headings.get(number, ())]
        outputs = getattr(instruction, "outputs", ())
        module = next((found for name in outputs if (found := places.get(schedule.buffers[name].value))), "")
        note = f"   # {module}" if module and module != previous else ""
        previous = module or previous
        lines.append(f"  {number:5}  {instruction}{note}")
    return "\n".join(lines)


def _headings(schedule: Schedule) -> dict[int, list[str]]:
    """By the number of an instruction what begins there: actions, and what stands between them."""
    found: dict[int, list[str]] = {}
    spans, end = [span for span in schedule.spans if span.begin < span.end], 0
    for span in spans:
        if span.begin > end:
            found[end] = ["between actions" if end else "before the first microbatch"]
        found[span.begin] = [span.action]
        end = span.end
    if spans and end < len(schedule.instructions):
        found[end] = ["after the last microbatch"]
    return found


def _local(compiled: Compiled) -> Program:
    """The last program, which schedules are written from."""
    last = compiled.steps[-1].program if compiled.steps else compiled.local
    return last if last.form is Form.LOCAL else compiled.local


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
    steps = (*compiled.steps, *compiled.schedule_steps)
    for step in reversed(compiled.steps):
        if step.name == name:
            return step.program
    raise AutoparError(f"no pass {name!r} ran; these did: {', '.join(step.name for step in steps)}")
