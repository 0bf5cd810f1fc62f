"""Reduces each gradient over its replicas as soon as it is summed over the microbatches, behind the rest of the backward.

ADD w_grad.sum (w_grad@3)                 the last microbatch
LAUNCH all_reduce sum dp (w_grad.sum) -> w_grad_1
RUN f4 (…)                                the backward goes on
WAIT w_grad_1                             at the end
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.fragments import FragmentCutter, buffer_of
from autopar.ir.actions import Reduction
from autopar.ir.collectives import is_launch, wait
from autopar.ir.instructions import Add, Instruction
from autopar.pipeline.buffer_names import BufferNames, renamed
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stage_rules import ancestors
from autopar.pipeline.stage_work import Sum
from autopar.pipeline.step_end import finished, local_sums


@dataclass(frozen=True)
class ReduceGradients:
    """Finish the sums of the stages of each rank: first collectives behind the last ADD, all that follows on them at the end.

    Reads: a `ScheduleProgram` with its actions written. Writes: fragments and collectives in place of reductions.
    Ensures: every sum that one stage makes and wants is where it belongs, complete.
    """

    name: str = "reduce gradients"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        names, cutter = BufferNames.of(program), FragmentCutter(program.device, program.fragments)
        places = []
        for place, schedule in enumerate(program.places):
            sums = [each for stage in program.stages_of(place) for each in local_sums(program, stage)]
            by_buffer: dict[str, list[Sum]] = {}
            for each in sums:
                by_buffer.setdefault(names.sum(buffer_of(each.target)), []).append(each)
            last = {each.target: position for position, each in enumerate(schedule.instructions) if isinstance(each, Add)}
            complete = {position: by_buffer[target] for target, position in last.items() if target in by_buffer}
            moved, under_way = set[Node](), set[Node]()
            groups: list[list[Instruction]] = []
            for position, instruction in enumerate(schedule.instructions):
                is_reduction = isinstance(program.action_of(instruction), Reduction)
                started = dict.fromkeys(node for each in complete.get(position, ()) for node in _starting(each) if node not in moved)
                moved.update(started)
                section = renamed(cutter.section(started, under_way), names.of_step)
                groups.append(section if is_reduction else [instruction, *section])
            places.append(schedule.regrouped(groups).appended(finished(sums, moved, cutter, names, under_way)))
        return program.with_places(places, actions={}, fragments=cutter.fragments, buffers=names.table)


def _starting(each: Sum) -> Iterator[Node]:
    """The collectives that wait for no other, and what their operands are made of, in the order of the graph."""
    within = frozenset(each.after)
    found = [ancestors([node], within=within) for node in each.after if is_launch(node)]
    first = set().union(*(before for before in found if all(node.target is not wait for node in before)))
    yield from (node for node in each.after if node in first)
