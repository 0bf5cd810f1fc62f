"""Looking into a compiled program: what was decided and why, what it costs, and how it looked after any pass."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch.fx import Node

from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError
from autopar.ir import printing
from autopar.ir.actions import PipelineSchedule, parse_action
from autopar.ir.instructions import Instruction, Run
from autopar.ir.keys import ORIGIN, SOURCE
from autopar.ir.pattern import is_meant, near_names
from autopar.ir.printing import op_name
from autopar.ir.program import Form, Program
from autopar.ir.schedule import Schedule, Span
from autopar.reports.explain import details, details_of
from autopar.reports.first_screen import first_screen
from autopar.reports.summary import summary
from autopar.reports.what_if import what_if
from autopar.reports.why import why

__all__ = ["diff", "explain", "print_program", "print_schedule", "summary", "what_if", "why"]


def explain(compiled: Compiled, pattern: str | None = None, detail: str | None = None, shares_process: bool = False) -> str:
    """What was decided, how and why, what it costs, what limits it: on one screen; or all that is known of what `pattern` names, or of
    one section (`detail`), or everything (`detail="all"`). `shares_process`: all ranks run in this process.

    Raises `AutoparError` for a pattern that names nothing, and for a section that there is not.
    """
    if pattern is not None and detail is not None:
        raise AutoparError(f"explain({pattern!r}, detail={detail!r}): a pattern and a section are two questions; ask one at a time")
    if pattern is not None:
        return details_of(compiled, pattern)
    return details(compiled, detail) if detail is not None else first_screen(compiled, shares_process)


def print_program(compiled: Compiled, after: str | None = None, rank: int = 0, module: str | None = None) -> str:
    """The program after the pass `after` as text; without, `rank`'s LOCAL program and its schedule. With `module`, a path or a pattern
    of paths (`model.layers.0`), only what it and the modules in it compute.

    Every rank of a dp × tp mesh runs one program; `rank` says with which coordinates. Of a pipeline a rank has the calls of its
    stages, and its row of the grid says in which order.
    Raises `AutoparError` for a pass that did not run, a rank that is not on the mesh, a module that computes nothing there.
    """
    if after is not None:
        written = next((step.program for step in reversed(compiled.schedule_steps) if step.name == after), None)
        if written is None:
            program = _after(compiled, after)
            return printing.print_program(program, shown=_of_module(program, module))
        if module is not None:
            raise AutoparError(
                f"after {after!r} there are instructions, of no module: leave out {module=}, or ask for print_program({module=})"
            )
        return str(written)
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
    local = _local(compiled)
    shown = _of_module(local, module)
    program = printing.print_program(local, stages=stages, shown=shown)
    values = None if shown is None else {node.name for node in shown}
    return "\n\n".join((*parts, program, print_schedule(compiled, rank, values)))


def _of_module(program: Program, module: str | None) -> set[Node] | None:
    """The calls of what `module` names; None for all of them, where it names nothing."""
    if module is None:
        return None
    found = {node for node in program.graph.nodes if node in SOURCE and is_meant(SOURCE[node].module, module)}
    if not found:
        modules = [SOURCE[node].module for node in program.graph.nodes if node in SOURCE and SOURCE[node].module]
        raise AutoparError(f"{module=} computes nothing in this program; there are {near_names(module, modules)}")
    return found


def _row(order: PipelineSchedule, place: int) -> Iterator[str]:
    """The line of one rank in the grid, with the line above it that names the schedule."""
    header, *lines = str(order).splitlines()
    yield header
    yield from (line for line in lines if re.match(rf"rank +{place} ", line))


def print_schedule(compiled: Compiled, rank: int = 0, values: Collection[str] | None = None) -> str:
    """The instructions, numbered as errors number them, with the user's modules that each fragment computes; with `values`, those of
    these nodes of the LOCAL graph alone.

    Of a pipeline they are grouped: a comment before those of each action (`# 0F2`), of what goes on between two, and at the ends.
    """
    schedule = compiled.schedule_of(rank)
    lines = [f"schedule: {len(schedule.instructions)} instructions, {len(schedule.fragments)} fragments"]
    places = {node.name: SOURCE[node].module for node in _local(compiled).graph.nodes if node in SOURCE}
    headings = _headings(schedule)
    previous = ""
    for number, instruction in enumerate(schedule.instructions):
        if values is not None and not _is_of(instruction, schedule, values):
            continue
        lines += [f"  # {heading}" for heading in headings.get(number, ())]
        outputs = getattr(instruction, "outputs", ())
        module = next((found for name in outputs if (found := places.get(schedule.buffers[name].value))), "")
        note = f"   # {module}" if module and module != previous else ""
        previous = module or previous
        lines.append(f"  {number:5}  {instruction}{note}")
    return "\n".join(lines)


def _is_of(instruction: Instruction, schedule: Schedule, values: Collection[str]) -> bool:
    """Whether an instruction computes one of these values, or moves, awaits or frees one."""
    names = instruction.writes if isinstance(instruction, Run) else (*instruction.reads, *instruction.writes)
    names = names or getattr(instruction, "buffers", ()) or (getattr(instruction, "target", ""),)
    return any(name in schedule.buffers and schedule.buffers[name].value in values for name in names)


def _headings(schedule: Schedule) -> dict[int, list[str]]:
    """By the number of an instruction what begins there: actions, and what stands between them."""
    found: dict[int, list[str]] = {}
    spans, end = [span for span in schedule.spans if span.begin < span.end], 0
    for span in spans:
        if span.begin > end:
            found[end] = ["between actions" if end else "before the first microbatch"]
        found[span.begin] = [span.action + _rest(schedule, span)]
        end = span.end
    if spans and end < len(schedule.instructions):
        found[end] = ["after the last microbatch"]
    return found


def _rest(schedule: Schedule, span: Span) -> str:
    """What else is computed there: actions take turns, and what waits for a sum lets others go first."""
    runs = [each for each in schedule.instructions[span.begin : span.end] if isinstance(each, Run)]
    numbers = {schedule.buffers[name].microbatch for each in runs for name in each.outputs}
    others = sorted(number for number in numbers if number is not None and number != parse_action(span.action).microbatch)
    return f", with some of microbatch{'es' * (len(others) > 1)} {', '.join(map(str, others))}" if others else ""


def _local(compiled: Compiled) -> Program:
    """The last program, which schedules are written from."""
    last = compiled.steps[-1].program if compiled.steps else compiled.local
    return last if last.form is Form.LOCAL else compiled.local


def diff(compiled: Compiled, before: str, after: str, module: str | None = None) -> str:
    """What changed between two passes, as a unified diff; values keep their names from form to form. With `module` what changed of it
    and the modules in it. Raises `AutoparError` for a pass that did not run, and a module that computes nothing there."""
    first, second = _after(compiled, before), _after(compiled, after)
    header = f"after {before!r} → after {after!r}: {_change(first, second)}"
    return f"{header}\n{printing.diff(first, second, shown=(_of_module(first, module), _of_module(second, module)))}"


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
