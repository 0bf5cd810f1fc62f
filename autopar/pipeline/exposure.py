"""What a step is made of on each rank: computing, starting communication, waiting for collectives, and idling for other stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from autopar.ir.instructions import Copy, Launch, Pause, Receive, Send, Wait
from autopar.ir.schedule import Schedule
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.simulate import Event, Simulation


class Interval(NamedTuple):
    """An instruction at work: its number, and seconds from the start of the step."""

    number: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Exposure:
    """Seconds of a rank's step, or of several ranks' on average.

    exposed  in WAITs for collectives: communication that no compute hides
    copy     in WAITs for what is copied to host memory or files, and back
    bubble   in WAITs for transfers, before the first instruction and after the last
    """

    step_seconds: float
    compute_seconds: float
    launch_seconds: float
    exposed_seconds: float
    copy_seconds: float = 0.0

    @property
    def bubble_seconds(self) -> float:
        known = self.compute_seconds + self.launch_seconds + self.exposed_seconds + self.copy_seconds
        return max(self.step_seconds - known, 0.0)

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def bubble_share(self) -> float:
        return self.bubble_seconds / self.step_seconds if self.step_seconds else 0.0

    def __str__(self) -> str:
        copies = f", {self.copy_seconds / self.step_seconds:.1%} for copies" if self.copy_seconds else ""
        return f"{self.exposed_share:.1%} of it waits for collectives{copies}, {self.bubble_share:.1%} for other stages"


def exposure(rows: Sequence[tuple[Schedule, Sequence[Interval]]]) -> Exposure:
    """Of ranks that ran these schedules in one step, on average."""
    step = max((row[-1].end for _, row in rows if row), default=0.0)
    seconds = {"compute": 0.0, "launch": 0.0, "exposed": 0.0, "copy": 0.0, "transfer": 0.0}
    for schedule, row in rows:
        kinds = kinds_of(schedule)
        for each in row:
            seconds[kinds[each.number]] += each.seconds / len(rows)
    return Exposure(step, seconds["compute"], seconds["launch"], seconds["exposed"], seconds["copy"])


def kinds_of(schedule: Schedule) -> list[str]:
    """What each instruction does with its time: "compute", "launch", or in a WAIT "exposed", for a collective, "copy" or "transfer"."""
    found: list[str] = []
    flights: dict[str, str] = {}
    for each in schedule.instructions:
        if isinstance(each, (Launch, Copy, Send, Receive)):
            flights[each.name] = "exposed" if isinstance(each, Launch) else "copy" if isinstance(each, Copy) else "transfer"
            found.append("launch")
        else:
            found.append(flights[each.target] if isinstance(each, Wait) else "compute")
    return found


def predicted_intervals(simulation: Simulation) -> list[list[Interval]]:
    """By place along `pp`."""
    rows = ([0.0, *ends] for ends in simulation.instruction_seconds)
    return [[Interval(number, begin, end) for number, (begin, end) in enumerate(pairwise(row))] for row in rows]


def predicted_exposure(program: ScheduleProgram, simulation: Simulation) -> Exposure:
    """On paper, of the ranks at all places."""
    return exposure(list(zip(program.places, predicted_intervals(simulation), strict=True)))


def events(rank: int, schedule: Schedule, row: Iterable[Interval]) -> Iterator[Event]:
    """A timeline: what a rank computes, launches and waits for, and beside it what is under way over each set of axes, until its WAIT."""
    flights: dict[str, tuple[str, float]] = {}
    names = {"exposed": "wait", "copy": "wait", "transfer": "wait"}
    kinds = kinds_of(schedule)
    for each in row:
        instruction, kind = schedule.instructions[each.number], kinds[each.number]
        if isinstance(instruction, Pause):
            continue
        label = str(instruction).split(" (", 1)[0]
        yield Event(rank, names.get(kind, kind), label, each.begin, each.end)
        if isinstance(instruction, Copy):
            flights[instruction.name] = f"under way to {instruction.memory}", each.begin
        elif isinstance(instruction, (Launch, Send, Receive)):
            along = ",".join(instruction.axes) if isinstance(instruction, Launch) else instruction.axis
            flights[instruction.name] = f"under way over {along}", each.begin
        elif isinstance(instruction, Wait):
            stream, begin = flights.pop(instruction.target)
            yield Event(rank, stream, instruction.target, begin, each.end)
