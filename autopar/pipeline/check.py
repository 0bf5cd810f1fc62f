"""The proof of the schedules of all ranks together: of a grid, or of what passes have written so far.

Of actions that are not written out
at each place  every action of its stages runs once for each microbatch, and nothing else: F, then B, or I and W
along `pp`     F before the backward, I before W
               what an action makes for another place is sent, what is received is read, where the stage is
               gradients are reduced once per stage, after its last backward
               bytes stay within the budget
all the rest   is proved as of any schedule (`autopar.checks.schedule`): what is read is there, received and waited for, or made
               before on the same rank; the k-th send of a channel and its k-th receive carry the same value; everybody gets to
               the end when a WAIT is passed only once both ends have launched (rendezvous)

All violations are reported together; the grid shows where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.checks.buffers import place
from autopar.checks.schedule import check_schedule
from autopar.checks.violation import Violation, report
from autopar.errors import ScheduleError
from autopar.ir.actions import Edge, PipelineSchedule
from autopar.pipeline.check_actions import check_actions
from autopar.pipeline.cost import PipelineCost, grid_memory
from autopar.pipeline.expand import expand
from autopar.pipeline.marks import marked_grid
from autopar.pipeline.schedule_program import ScheduleProgram

# One number for all places along `pp`, or one for each; None: no limit.
Limit = float | Sequence[float] | None


def check_pipeline(
    pipeline: PipelineSchedule | ScheduleProgram,
    cost: PipelineCost | None = None,
    budget_bytes: Limit = None,
    edges: Sequence[Edge] | None = None,
) -> ScheduleProgram:
    """The instructions of `pipeline`, proved to run to the end and to compute every gradient once.

    `edges` says which stage feeds which (by default as `cost` says, else each the next); `budget_bytes` needs a `cost`.
    Raises `ScheduleError` naming every violation; the grid, with a mark at each, is attached as a note.
    """
    if edges is None and cost is not None:
        edges = tuple(cost.edges)
    program = expand(pipeline, edges) if isinstance(pipeline, PipelineSchedule) else pipeline
    found = schedule_violations(program, cost, budget_bytes)
    if found:
        error = ScheduleError(report(found, f"pipeline {program.order.name}"))
        error.add_note(marked_grid(program, found))
        raise error
    return program


def schedule_violations(program: ScheduleProgram, cost: PipelineCost | None = None, budget_bytes: Limit = None) -> list[Violation]:
    """Every violation in the instructions of all ranks, of a grid or of a program that a pass has written.

    Until the program is executable nothing is said of buffers that stay, nor of results as long as they have no places.
    """
    if budget_bytes is not None and cost is None:
        raise ScheduleError("a budget in bytes needs prices that say what actions hold: pass cost=")
    num_places, stages = len(program.places), program.order.stages
    if program.has_whole_actions and not all(0 <= at < num_places for at in stages):
        got = f"stages at pp = {', '.join(map(str, stages))}"
        return [Violation("a stage lies at a place that is not there", expected=f"pp = 0 to {num_places - 1}", got=got)]
    found = check_actions(program) if program.has_whole_actions and _has_backward(program) else []
    # Of an instruction that is wrong in itself what follows for its buffers is not told as well.
    named = {each for violation in found for each in violation.instructions}
    schedules = {rank: program.schedule_of(rank) for rank in range(program.mesh.size)}
    others = check_schedule(schedules, program.mesh, program.actions, program.is_executable)
    found += [each for each in others if not each.instructions or not named.issuperset(each.instructions)]
    # What a faulty program holds says nothing.
    if cost is not None and budget_bytes is not None and not found:
        found += _check_memory(program, cost, budget_bytes)
    return found


def _has_backward(program: ScheduleProgram) -> bool:
    return program.cut is None or bool(program.cut.program.signature.outputs_of("gradient"))


def _check_memory(program: ScheduleProgram, cost: PipelineCost, budget_bytes: float | Sequence[float]) -> Iterator[Violation]:
    for at, memory in enumerate(grid_memory(program, cost)):
        limit = budget_bytes[at] if isinstance(budget_bytes, Sequence) else budget_bytes
        # Sums of many floats may miss a limit that they meet on paper.
        over = next((step for step in memory.steps if step.during_bytes > limit * (1 + 1e-9)), None)
        if over is not None:
            rank = program.first_at(at)
            where = place(rank, over.position, program.places[at].instructions[over.position])
            got = f"{over.during_bytes:.6g} bytes, {over.live_microbatches} live microbatches (peak {memory.peak_bytes:.6g} bytes)"
            fix, here = "run a backward before the next forward", ((rank, over.position),)
            yield Violation("memory over budget", where, f"at most {limit:.6g} bytes", got, fix, instructions=here)
