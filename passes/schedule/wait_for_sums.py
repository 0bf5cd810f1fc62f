"""Sums that are scattered are waited for while the backward goes on, so that what they were made of is not there all at once.

LAUNCH reduce_scatter sum dp (a) -> p_a
RUN f7 (…) -> (b)
LAUNCH reduce_scatter sum dp (b) -> p_b
RUN f8 (…) -> (c)
LAUNCH reduce_scatter sum dp (c) -> p_c
WAIT p_a                                         in place of the end: two more are on their way, a can go
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.ir.instructions import Instruction, Launch, Wait
from autopar.ir.schedule import Schedule
from autopar.passes.schedule.overlap_communication import links_of
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import simulate

# So many may be under way over the same axes, what takes less memory first.
MOST_UNDER_WAY = (2, 4, 8)
# A step may be so much longer on paper, which knows no better.
_SLACK = 0.002


@dataclass(frozen=True)
class WaitForSums:
    """Wait for a reduce-scatter once `MOST_UNDER_WAY` more are launched over its axes, where nobody reads it sooner.

    Its operand, as large as all that arrives on all ranks, is in use until then. Compute that is kept waiting here would have waited at
    the end, as long as links have work; where a step is longer on paper nevertheless, more may be under way, and in the end all.

    Reads: a `ScheduleProgram` in its final order, without FREEs. Writes: WAITs, earlier. Ensures: a step is not longer on paper.
    """

    cluster: Cluster
    name: str = "wait for sums"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        tried = [moved for most in MOST_UNDER_WAY if (moved := with_most_under_way(program, most)) is not program]
        if not tried:
            return program
        seconds, links = fragment_seconds(program, CostModel(self.cluster, program.mesh)), links_of(self.cluster, program.mesh)

        def takes(each: ScheduleProgram) -> float:
            return simulate(each, seconds, links, has_memory=False).step_seconds

        limit = (1 + _SLACK) * takes(program)
        return next((each for each in tried if takes(each) <= limit), program)


def with_most_under_way(program: ScheduleProgram, most: int) -> ScheduleProgram:
    """`program` with no more reduce-scatters under way over the same axes; itself, where there never are."""
    places = [_with_waits(schedule, most) for schedule in program.places]
    if all(new is old for new, old in zip(places, program.places, strict=True)):
        return program
    return program.with_places(places)


def _with_waits(schedule: Schedule, most: int) -> Schedule:
    """With each WAIT for a reduce-scatter no later than behind the LAUNCH of the `most`-th after it."""
    instructions = schedule.instructions
    waits = {each.target: position for position, each in enumerate(instructions) if isinstance(each, Wait)}
    groups: list[Sequence[Instruction]] = [(each,) for each in instructions]
    under_way: dict[tuple[str, ...], deque[str]] = {}
    for position, each in enumerate(instructions):
        if isinstance(each, Launch) and each.collective == "reduce_scatter":
            flights = under_way.setdefault(each.axes, deque())
            flights.append(each.name)
            if len(flights) > most and (wait := waits[flights.popleft()]) > position:
                groups[position] = (*groups[position], instructions[wait])
                groups[wait] = ()
    return schedule if all(groups) else schedule.regrouped(groups)
