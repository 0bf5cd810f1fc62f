"""The first schedule: whole actions, in the order of the pipeline, and what stages send each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.actions import PipelineSchedule
from autopar.ir.instructions import Instruction, Pause
from autopar.ir.program import Form, Program, Signature
from autopar.ir.schedule import Schedule
from autopar.pipeline.check import check_pipeline
from autopar.pipeline.expand import expand
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stage_cut import StageCut, cut_stages


@dataclass(frozen=True)
class OrderActions:
    """Write the actions of every rank along `pp` in the order that the program has, with the transfers between them.

    PAUSE stands where a forward hands out what it computed: at the end, or, where one microbatch runs through one stage, between
    its forward and its backward. Fragments will create tensors on a device of the type `device`.

    Reads: STAGE, PHASE of a LOCAL program, and its order. Writes: a `ScheduleProgram` of actions, whether all is over at
    PAUSE. Ensures: every action comes after
    what it needs, on whatever rank. Raises `ScheduleError` naming every fault of the order.
    """

    device: str = "cpu"
    name: str = "order actions"

    def apply(self, program: Program) -> ScheduleProgram:
        assert program.form is Form.LOCAL
        cut = cut_stages(program, program.order.num_stages)
        ordered = _ordered(program.order, cut)
        signature = replace(program.signature, inputs=(), outputs=())
        places = [_paused(each, signature, program) for each in ordered.places]
        return replace(ordered, mesh=program.mesh.ranks, order=program.order, cut=cut, device=self.device).with_places(places)


def _ordered(order: PipelineSchedule, cut: StageCut) -> ScheduleProgram:
    """The actions of all ranks; of a program without gradients its forwards alone."""
    if cut.program.signature.outputs_of("gradient"):
        return check_pipeline(order, edges=cut.edges)
    forwards = tuple(tuple(action for action in row if action.kind == "F") for row in order.orders)
    return expand(replace(order, orders=forwards), cut.edges)


def _paused(schedule: Schedule, signature: Signature, program: Program) -> Schedule:
    schedule = replace(schedule, signature=signature)
    if not program.signature.inputs_of("tangent"):
        return schedule
    # The backward of one microbatch may wait for its gradient; that of several has begun before the last forward is over.
    is_over = not program.order.is_single
    groups: list[list[Instruction]] = [[each] for each in schedule.instructions]
    groups[-1 if is_over else schedule.spans[0].begin].append(Pause())
    return replace(schedule.regrouped(groups), is_over_at_pause=is_over)
