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
from autopar.ir.units import in_seconds
from autopar.passes.schedule.overlap_communication import links_of
from autopar.pipeline.fragment_prices import fragment_seconds
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import simulate

# How many may be under way over the same axes: what takes less memory is tried first.
MOST_UNDER_WAY = (2, 4, 8)
# A step may be so much longer on paper, which knows no better.
_SLACK = 0.002


@dataclass(frozen=True)
class MostUnderWay:
    """How many reduce-scatters may be under way over the same axes, besides the one just launched; None: any number. And why."""

    number: int | None
    reason: str = ""

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class WaitForSums:
    """Wait for a reduce-scatter once so many more are launched over its axes, where nobody reads it sooner.

    Its operand, as large as all that arrives on all ranks, is in use until then. Compute that is kept waiting here would have waited at
    the end, as long as links have work; where a step is longer on paper nevertheless, more may be under way, and in the end all.

    Reads: a `ScheduleProgram` in its final order, without FREEs. Writes: WAITs, earlier. Ensures: a step is longer on paper by 0.2 % at
    most.
    """

    cluster: Cluster
    name: str = "wait for sums"

    def decide(self, program: ScheduleProgram) -> MostUnderWay:
        tried = {most: moved for most in MOST_UNDER_WAY if (moved := with_most_under_way(program, most)) is not program}
        if not tried:
            return MostUnderWay(None, "never are more under way than may be")
        seconds, links = fragment_seconds(program, CostModel(self.cluster, program.mesh)), links_of(self.cluster, program.mesh)

        def takes(each: ScheduleProgram) -> float:
            return simulate(each, seconds, links, has_memory=False).step_seconds

        before = takes(program)
        for most, each in tried.items():
            if (after := takes(each)) <= (1 + _SLACK) * before:
                return MostUnderWay(most, f"{most} under way while another is launched: {in_seconds(before)} → {in_seconds(after)} a step")
        return MostUnderWay(None, f"all are waited for at the end: sooner, a step would take more than {in_seconds(before)}")

    def apply(self, program: ScheduleProgram, decision: MostUnderWay) -> ScheduleProgram:
        return program if decision.number is None else with_most_under_way(program, decision.number)

    def written(self, program: ScheduleProgram, decision: MostUnderWay) -> int | None:
        return decision.number

    def read(self, program: ScheduleProgram, value: int | None) -> MostUnderWay:
        return MostUnderWay(value)


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
