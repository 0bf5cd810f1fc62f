"""The proof of a pipeline before it runs, over the instructions of all ranks together.

on each rank   every action of its stages runs once for each microbatch, and nothing else: F, then B, or I and W
               F before the backward, I before W; what another stage gives is there when it is read: received and waited
               for, or made before on the same rank
               a send follows the action that makes its value; sends and receives name the rank that holds the other
               stage, are launched once and waited for once, and what is received is read
               gradients are reduced once per stage, after its last backward
               bytes stay within the budget
across ranks   the k-th send of a channel (a directed pair of ranks) and its k-th receive carry the same value
               everybody gets to the end when a WAIT is passed only once both ends have launched (rendezvous)

All violations are reported together; the grid shows where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.checks.violation import report
from autopar.errors import ScheduleError
from autopar.pipeline.actions import Edge, PipelineSchedule, Place
from autopar.pipeline.check_rank import check_rank
from autopar.pipeline.check_rendezvous import check_rendezvous
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.expand import expand
from autopar.pipeline.fault import Fault, fault_at
from autopar.pipeline.memory import rank_memory
from autopar.pipeline.program import Compute, PipelineProgram

# One number for all ranks, or one for each; None: no limit.
Limit = float | Sequence[float] | None


def check_pipeline(
    pipeline: PipelineSchedule | PipelineProgram,
    cost: PipelineCost | None = None,
    budget_bytes: Limit = None,
    edges: Sequence[Edge] | None = None,
) -> PipelineProgram:
    """The instructions of `pipeline`, proved to run to the end and to compute every gradient once.

    `edges` says which stage feeds which (by default as `cost` says, else each the next); `budget_bytes` needs a `cost`.
    Raises `ScheduleError` naming every violation; the grid, with a mark at each, is attached as a note.
    """
    if edges is None and cost is not None:
        edges = tuple(cost.edges)
    program = expand(pipeline, edges) if isinstance(pipeline, PipelineSchedule) else pipeline
    found = check_program(program, cost, budget_bytes)
    if found:
        error = ScheduleError(report(found, f"pipeline {program.name}"))
        error.add_note(marked_grid(program, found))
        raise error
    return program


def check_program(program: PipelineProgram, cost: PipelineCost | None = None, budget_bytes: Limit = None) -> list[Fault]:
    """Every violation in the instructions of all ranks."""
    if budget_bytes is not None and cost is None:
        raise ScheduleError("a budget in bytes needs prices that say what actions hold: pass cost=")
    num_ranks = len(program.ranks)
    if not all(0 <= rank < num_ranks for rank in program.stages):
        got = f"stages on ranks {' '.join(map(str, program.stages))}"
        return [Fault("a stage lies on a rank that is not there", expected=f"ranks 0 to {num_ranks - 1}", got=got)]
    found = [fault for rank in range(num_ranks) for fault in check_rank(program, rank)]
    found += check_rendezvous(program)
    if cost is not None and budget_bytes is not None:
        for rank in range(num_ranks):
            limit = budget_bytes[rank] if isinstance(budget_bytes, Sequence) else budget_bytes
            found += _check_memory(program, rank, cost, limit)
    return found


def _check_memory(program: PipelineProgram, rank: int, cost: PipelineCost, budget_bytes: float) -> Iterator[Fault]:
    if any(isinstance(each, Compute) and each.action.stage >= len(program.stages) for each in program.ranks[rank]):
        return  # Named already, and without a price.
    memory = rank_memory(program, rank, cost)
    # Sums of many floats may miss a limit that they meet on paper.
    over = next((step for step in memory.steps if step.during_bytes > budget_bytes * (1 + 1e-9)), None)
    if over is not None:
        got = f"{over.during_bytes:.6g} bytes, {over.live_microbatches} live microbatches (peak {memory.peak_bytes:.6g} bytes)"
        fix = "run a backward before the next forward"
        yield fault_at(program, rank, over.position, "memory over budget", f"at most {budget_bytes:.6g} bytes", got, fix)


def marked_grid(program: PipelineProgram, found: Iterable[Fault]) -> str:
    """The schedule's picture with the numbers of the violations at their places."""
    marks: dict[Place, str] = {}
    for number, fault in enumerate(found, 1):
        for place in fault.places:
            marks[place] = f"{marks[place]}, {number}" if place in marks else f"ERROR {number}"
    return program.schedule.grid(marks)
