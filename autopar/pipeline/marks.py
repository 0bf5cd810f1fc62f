"""From instructions to cells of the printed grid of actions, so that errors can be marked there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.checks.violation import Violation
from autopar.ir.actions import Action, GridCell, PipelineSchedule
from autopar.ir.instructions import Instruction, Receive, Run, Send
from autopar.pipeline.schedule_program import ScheduleProgram


def marked_grid(program: ScheduleProgram, found: Iterable[Violation]) -> str:
    """The picture of what the ranks run, with the numbers of the violations at their places."""
    marks: dict[GridCell, str] = {}
    for number, violation in enumerate(found, 1):
        for place in (grid_place(program, *each) for each in violation.instructions):
            marks[place] = f"{marks[place]}, {number}" if place in marks else f"ERROR {number}"
    return executed_order(program).grid(marks)


def executed_order(program: ScheduleProgram) -> PipelineSchedule:
    """The actions that the ranks run, of a program edited by hand others than those of its order."""
    rows = (map(program.action_of, schedule.instructions) for schedule in program.places)
    return replace(program.order, orders=tuple(tuple(each for each in row if isinstance(each, Action)) for row in rows))


def grid_place(program: ScheduleProgram, rank: int, number: int) -> GridCell:
    """The action that an instruction belongs to: a receive to its reader, a send to its maker, a WAIT to what it holds up."""
    place, row = program.place_of(rank), program.schedule_of(rank).instructions
    runs = [(at, action) for at, each in enumerate(row) if isinstance(action := program.action_of(each), Action)]
    before = sum(at < number for at, _ in runs)
    instruction = row[number] if number < len(row) else None
    if isinstance(instruction, Receive) and instruction.transfer in program.transfers:
        readers = program.transfers[instruction.transfer].readers
        return GridCell(place, next((count for count, (_, action) in enumerate(runs) if action in readers), before))
    return GridCell(place, before - 1 if _follows(program, instruction) and before else before)


def _follows(program: ScheduleProgram, instruction: Instruction | None) -> bool:
    """Whether an instruction goes with the action before it: a send, a reduction."""
    return isinstance(instruction, Send) or (isinstance(instruction, Run) and not isinstance(program.action_of(instruction), Action))
