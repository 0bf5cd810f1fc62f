"""The check: after every pass, always on. All violations are collected; the printed program is attached.

Values are recomputed from operands, shardings compared along every edge, collectives matched with what is
unreduced. `check_program`, `check_shardings`, `check_local` and `check_schedule` list the invariants of each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.checks.copies import check_round_trips
from autopar.checks.local import check_local
from autopar.checks.program import Values, check_program
from autopar.checks.sharding import check_shardings
from autopar.checks.violation import Violation, report
from autopar.driver.compiled import PassRun, SchedulePassRun
from autopar.errors import CheckError, ScheduleError
from autopar.ir.instructions import Copy
from autopar.ir.printing import print_program
from autopar.ir.program import Form, Program
from autopar.pipeline.check import schedule_violations
from autopar.pipeline.schedule_program import ScheduleProgram


def violations(program: Program, values: Values | None = None, origin: Program | None = None) -> list[Violation]:
    """Every broken invariant of `program`.

    `values` remembers what ops yield from call to call; `origin` is the GLOBAL program that a LOCAL one came from.
    """
    found = check_program(program, values)
    if any(violation.is_fatal for violation in found):
        return found
    if program.form is Form.LOCAL:
        return found + check_local(program, origin)
    return found + check_shardings(program, None if values is None else values.spaces)


def check(program: Program, title: str = "check", values: Values | None = None, origin: Program | None = None) -> None:
    """Raise `CheckError` naming every broken invariant of `program`, the program's text attached as a note."""
    found = violations(program, values, origin)
    if found:
        error = CheckError(report(found, title))
        error.add_note(print_program(program))
        raise error


@dataclass
class Checker:
    """The check as an observer of passes. It remembers what ops yield, the last GLOBAL program for the LOCAL ones that follow, and what
    it proved last: a pass may have had nothing to do."""

    values: Values = field(default_factory=Values)
    origin: Program | None = None
    proved: Program | ScheduleProgram | None = None
    marks: tuple[int, ...] = ()

    def __call__(self, step: PassRun | SchedulePassRun) -> None:
        title = f"after pass {step.number}, {step.name}" if step.number else "as captured"
        marks = _marks(step.program) if isinstance(step.program, Program) else ()
        if step.program is self.proved and marks == self.marks:
            return
        if isinstance(step, SchedulePassRun):
            check_schedule_program(step.program, title)
            before = self.proved.places if isinstance(self.proved, ScheduleProgram) else ()
            if before and any(isinstance(each, Copy) for schedule in step.program.places for each in schedule.instructions):
                _raise_for(check_round_trips(before, step.program.places), step.program, title)
        else:
            check(step.program, title, self.values, self.origin)
            if step.program.form is Form.GLOBAL:
                self.origin = step.program
        self.proved, self.marks = step.program, marks


def _marks(program: Program) -> tuple[int, ...]:
    """What changes when somebody edits the graph in place, against the rules: which objects its nodes are made of."""
    found: list[object] = []
    for node in program.graph.nodes:
        found += (node, node.target, node.args, node.kwargs)
        found += node.meta.values()
    return tuple(map(id, found))


def check_schedule_program(program: ScheduleProgram, title: str = "") -> None:
    """Raise `ScheduleError` naming everything that would go wrong with what is written of a schedule so far.

    The schedule that the first violation is about is attached, its lines numbered as errors number them.
    """
    _raise_for(schedule_violations(program), program, title)


def _raise_for(found: Sequence[Violation], program: ScheduleProgram, title: str) -> None:
    if found:
        error = ScheduleError(report(found, f"schedule on {program.mesh}{title and f', {title}'}"))
        shown = next((rank for violation in found for rank, _ in violation.instructions if rank < program.mesh.size), 0)
        lines = [f"{number:5}  {each}" for number, each in enumerate(program.schedule_of(shown).instructions)]
        error.add_note("\n".join([f"rank {shown}", *lines]))
        raise error
