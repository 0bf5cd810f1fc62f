"""Buffers are dropped after their last use, and fragments numbered as they run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.instructions import Run
from autopar.ir.lifetimes import with_frees
from autopar.pipeline.schedule_program import ScheduleProgram


@dataclass(frozen=True)
class FreeBuffers:
    """Free every buffer that is neither an input nor an output right after the last instruction that has to do with it.

    Fragments get the names f0, f1, … in the order in which ranks first run them.

    Reads: a `ScheduleProgram` with its results handed out. Writes: FREE. Ensures: ranks can run the program.
    """

    name: str = "free buffers"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        runs = [each for schedule in program.places for each in schedule.instructions if isinstance(each, Run)]
        names = {old: f"f{number}" for number, old in enumerate(dict.fromkeys(run.fragment for run in runs))}
        fragments = {new: replace(program.fragments[old], name=new) for old, new in names.items()}
        places = []
        for schedule in program.places:
            instructions = [
                replace(each, fragment=names[each.fragment]) if isinstance(each, Run) else each for each in schedule.instructions
            ]
            places.append(schedule.regrouped(with_frees(instructions, {*schedule.inputs, *schedule.outputs})))
        return replace(program.with_places(places, fragments=fragments), is_executable=True)
