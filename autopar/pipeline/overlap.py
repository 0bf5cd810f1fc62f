"""A rank's instructions in an order in which communication hides behind compute: a list schedule.

RUN f1 (w1)                    LAUNCH all_gather (p2) -> w2     as late as it may begin to be there in time
RUN g1 (…) -> (d1)             RUN f1 (w1)
LAUNCH reduce_scatter d1       RUN g1 (…) -> (d1)
WAIT d1                   →    LAUNCH reduce_scatter d1         as early as it can
ADD s1 (d1)                    WAIT w2                          as late as it is needed
LAUNCH all_gather (p2) -> w2   RUN f2 (w2)
WAIT w2                        WAIT d1                          what nobody is in a hurry for: once it has arrived
RUN f2 (w2)                    ADD s1 (d1)

The clock is a step on paper in which collectives take no time: bubbles of a pipeline are in it. What is larger than what it is made of,
gathered parameters, is launched shortly before it must be: it takes memory from then on. All else is launched as soon as it can be.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autopar.ir.dependencies import dependencies
from autopar.ir.instructions import Add, Launch, Pause, Receive, Run, Send, Wait
from autopar.ir.schedule import Schedule, Span
from autopar.pipeline.simulate import LinkOf, Seconds


@dataclass(frozen=True)
class Haste:
    """How a list schedule weighs memory against what the clock does not know.

    slack        what takes memory is launched so many times its own duration earlier than it needs to be
    ahead_bytes  so much of it may be launched and not waited for
    postpones    whether compute that waits for a sum lets what follows go first
    """

    slack: float = 1.0
    ahead_bytes: float = math.inf
    postpones: bool = True


@dataclass
class _Flight:
    """A collective: where it is launched and waited for, what computes its operand and nothing else, and when it has to start."""

    launch: int
    wait: int
    makers: tuple[int, ...]
    link: str
    seconds: float
    num_bytes: int
    is_early: bool
    ready: float
    deadline: float
    latest: float = 0.0
    due: float = -math.inf


@dataclass
class ListSchedule:
    """`ends` are when each instruction is over on a clock on which collectives take no time."""

    schedule: Schedule
    seconds: Seconds
    ends: Sequence[float]
    link_of: LinkOf

    def __post_init__(self) -> None:
        self.instructions = self.schedule.instructions
        self.before = dependencies(self.instructions)
        self.after: list[list[int]] = [[] for _ in self.instructions]
        for number, each in enumerate(self.before):
            for one in each:
                self.after[one].append(number)
        self.durations = [self.seconds(each) if isinstance(each, Run) else 0.0 for each in self.instructions]
        self.waits = {each.target: number for number, each in enumerate(self.instructions) if isinstance(each, Wait)}
        self.pause = next((number for number, each in enumerate(self.instructions) if isinstance(each, Pause)), -1)
        self.flights = self._flights()
        # By number of a LAUNCH, of a WAIT for it, and of its makers.
        self.by_launch = {each.launch: each for each in self.flights}
        self.by_wait = {each.wait: each for each in self.flights}
        self.floating = {number for each in self.flights for number in (each.launch, each.wait, *each.makers)}
        self.floating |= {self.waits[each.name] for each in self.instructions if isinstance(each, Receive)}
        self.haste = Haste()

    # ---- what is known before

    def _flights(self) -> list[_Flight]:
        found: list[_Flight] = []
        for number, each in enumerate(self.instructions):
            if isinstance(each, Launch):
                wait = self.waits[each.name]
                makers = tuple(sorted(one for one in self.before[number] if self._is_maker(one, number)))
                ready = max((self.ends[one] for one in self.before[number] if one not in makers), default=0.0)
                deadline = min((self._start(one) for one in self.after[wait]), default=self.ends[-1])
                given, left = (sum(map(self.schedule.bytes_of, names)) for names in (each.sources, each.targets))
                link = self.link_of(each.axes)
                found.append(_Flight(number, wait, makers, link, self.seconds(each), left, left <= given, ready, max(ready, deadline)))
        return found

    def _is_maker(self, number: int, launch: int) -> bool:
        """Whether an instruction computes from what is given an operand of this collective, and nothing else."""
        each = self.instructions[number]
        readers = [one for one in self.after[number] if one != self.pause]
        return isinstance(each, Run) and len(each.outputs) == 1 and readers == [launch] and self.before[number] <= {self.pause}

    def _start(self, number: int) -> float:
        return self.ends[number] - self.durations[number]

    def _set_times(self) -> None:
        """When each collective has to start for what waits for it to be in time, if its link is to carry all of them, and when it will."""
        links: dict[str, list[_Flight]] = defaultdict(list)
        for each in self.flights:
            links[each.link].append(each)
        for flights in links.values():
            blocking = max((each.seconds for each in flights if each.is_early), default=0.0)
            cap = due = math.inf
            for each in sorted(flights, key=lambda one: (self._wanted(one), one.launch), reverse=True):
                each.latest = cap = min(self._wanted(each), cap) - each.seconds
                due = min(due, each.latest - self.haste.slack * each.seconds - blocking)
                each.due = -math.inf if each.is_early else due

    def _wanted(self, flight: _Flight) -> float:
        return min(flight.deadline, flight.ready + 2 * flight.seconds) if flight.is_early else flight.deadline

    # ---- writing

    def order(self, haste: Haste) -> tuple[int, ...]:
        """The numbers of the instructions as they are to stand."""
        self.haste = haste
        self._begin()
        chain = [number for number in range(len(self.instructions)) if number not in self.floating]
        postponed: list[int] = []
        for number in chain:
            if self.is_written[number]:
                continue
            self._launch(until=self.ends[number])
            postponed = [each for each in postponed if not self._write_arrived(each)]
            if self._may_be_postponed(number):
                postponed.append(number)
                continue
            self._write(number)
        for each in (*postponed, *sorted(self.floating)):
            self._write(each)
        assert len(self.written) == len(self.instructions)
        return tuple(self.written)

    def _begin(self) -> None:
        self._set_times()
        self.written: list[int] = []
        self.is_written = [False] * len(self.instructions)
        self.now, self.ahead_bytes = 0.0, 0
        self.free: dict[str, float] = defaultdict(float)
        self.arrival: dict[int, float] = {}  # by number of the LAUNCH
        # By number of what is postponed one of the collectives that it waits for.
        self.awaited: dict[int, _Flight] = {}
        # How many instructions each collective still waits for, and those that wait for none, by when they are due.
        self.blocking = {each.launch: len(self.before[each.launch].difference(each.makers)) for each in self.flights}
        self.ready = [(each.due, each.latest, each.launch) for each in self.flights if not self.blocking[each.launch]]
        heapq.heapify(self.ready)

    def _launch(self, until: float) -> None:
        """Launch what is due before the next chance, on the clock without collectives, in the order in which it has to start."""
        due: list[tuple[float, float, int]] = []
        while self.ready and self.ready[0][0] < until:
            due.append(heapq.heappop(self.ready))
        for each in sorted(due, key=lambda one: one[1:]):
            flight = self.by_launch[each[2]]
            if self.is_written[flight.launch]:
                continue
            if flight.is_early or not self.ahead_bytes or self.ahead_bytes + flight.num_bytes <= self.haste.ahead_bytes:
                self._write(flight.launch)
            else:
                heapq.heappush(self.ready, each)

    def _write_arrived(self, number: int) -> bool:
        """Write what was postponed if nothing keeps it waiting any more.

        What it waited for keeps it waiting until it is there: what lies between would not have been written without it.
        """
        if not self.is_written[number] and not self._is_missing(self.awaited[number]):
            if missing := self._missing(number):
                self.awaited[number] = missing[0]
            else:
                self._write(number)
        return self.is_written[number]

    def _is_missing(self, flight: _Flight) -> bool:
        return not self.is_written[flight.wait] and self.arrival.get(flight.launch, math.inf) > self.now

    def _missing(self, number: int) -> list[_Flight]:
        """The collectives that an instruction would wait for now, by itself or for what was postponed before it."""
        found: list[_Flight] = []
        seen, stack = {number}, [number]
        while stack:
            for one in self.before[stack.pop()]:
                if self.is_written[one] or one in seen:
                    continue
                seen.add(one)
                flight = self.by_wait.get(one)
                if flight is None:
                    stack.append(one)
                elif self._is_missing(flight):
                    found.append(flight)
        return found

    def _may_be_postponed(self, number: int) -> bool:
        if not self.haste.postpones or not isinstance(self.instructions[number], (Run, Add)):
            return False
        missing = self._missing(number)
        if not missing or not all(each.is_early for each in missing):
            return False
        self.awaited[number] = missing[0]
        return True

    def _write(self, number: int) -> None:
        """Write an instruction behind all that it follows."""
        stack = [number]
        while stack:
            top = stack[-1]
            needed = [] if self.is_written[top] else [one for one in sorted(self.before[top], reverse=True) if not self.is_written[one]]
            if needed:
                stack += needed
                continue
            stack.pop()
            if not self.is_written[top]:
                self._run(top)

    def _run(self, number: int) -> None:
        each = self.instructions[number]
        self.is_written[number] = True
        self.written.append(number)
        if isinstance(each, Launch):
            self._start_flight(self.by_launch[number])
        elif isinstance(each, Wait):
            flight = self.by_wait.get(number)
            self.now = max(self.now, self.ends[number] if flight is None else self.arrival[flight.launch])
            self.ahead_bytes -= flight.num_bytes if flight is not None and not flight.is_early else 0
        else:
            self.now += self.durations[number]
        for one in self.after[number]:
            if one in self.blocking and number not in self.by_launch[one].makers:
                self.blocking[one] -= 1
                if not self.blocking[one]:
                    flight = self.by_launch[one]
                    heapq.heappush(self.ready, (flight.due, flight.latest, flight.launch))
            elif isinstance(self.instructions[one], Send) and all(self.is_written[other] for other in self.before[one]):
                self._write(one)

    def _start_flight(self, flight: _Flight) -> None:
        self.free[flight.link] = self.arrival[flight.launch] = max(self.now, self.free[flight.link]) + flight.seconds
        self.ahead_bytes += 0 if flight.is_early else flight.num_bytes


def reordered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """`schedule` with its instructions in this order.

    A span goes from the first instruction of its action that computes to the last one before those of the next; what was postponed beyond
    that lies in the span of another, and so does what was launched ahead.
    """
    instructions = schedule.instructions
    operands = {name for each in instructions if isinstance(each, Launch) for name in each.sources}
    computing = {number for number, each in enumerate(instructions) if isinstance(each, Run) and not operands.issuperset(each.outputs)}
    at = {number: position for position, number in enumerate(order)}
    bodies = [[at[number] for number in range(span.begin, span.end) if number in computing] for span in schedule.spans]
    limits = list(accumulate((min(body, default=len(order)) for body in reversed(bodies)), min, initial=len(order)))[-2::-1]
    spans: list[Span] = []
    end = 0
    for span, body, limit in zip(schedule.spans, bodies, limits, strict=True):
        inside = [each for each in body if end <= each < limit]
        begin, end = min(inside, default=end), max(inside, default=end - 1) + 1
        spans.append(Span(span.action, begin, end))
    return replace(schedule, instructions=tuple(instructions[number] for number in order), spans=tuple(spans))
