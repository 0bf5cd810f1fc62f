"""Reduces the gradients of each stage over its replicas, once a step, after its last backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.fragments import FragmentCutter
from autopar.ir.actions import Reduction
from autopar.ir.instructions import Instruction
from autopar.pipeline.buffer_names import BufferNames
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.step_end import finished, local_sums


@dataclass(frozen=True)
class ReduceGradients:
    """Finish the sums of each stage after its last backward; those of a program without gradients at the end.

    Reads: a `ScheduleProgram` with its actions written. Writes: fragments and collectives in place of reductions.
    Ensures: every sum that one stage makes and wants is where it belongs, complete.
    """

    name: str = "reduce gradients"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        names, cutter = BufferNames.of(program), FragmentCutter(program.device, program.fragments)
        places = []
        for place, schedule in enumerate(program.places):
            moved, waiting = set[Node](), program.stages_of(place)
            groups: list[list[Instruction]] = []
            for instruction in schedule.instructions:
                action = program.action_of(instruction)
                if isinstance(action, Reduction):
                    waiting.remove(action.stage)
                    groups.append(finished(local_sums(program, action.stage), moved, cutter, names))
                else:
                    groups.append([instruction])
            late = [each for stage in waiting for each in finished(local_sums(program, stage), moved, cutter, names)]
            places.append(schedule.regrouped(groups).appended(late))
        return program.with_places(places, actions={}, fragments=cutter.fragments, buffers=names.table)
