"""Two actions of one rank, on two microbatches, take turns: while a collective of one moves, the other computes.

RUN b0 (…)                                      backward of microbatch 0                RUN b0 (…)
LAUNCH all_reduce sum tp (b) -> g@0                                                     LAUNCH all_reduce sum tp (b) -> g@0
WAIT g@0                                                                                RUN f0 (x@1)
RUN b1 (g@0)                                                                    →       LAUNCH all_reduce sum tp (f) -> h@1
RUN f0 (x@1)                                    forward of microbatch 1                 WAIT g@0
LAUNCH all_reduce sum tp (f) -> h@1                                                     RUN b1 (g@0)
WAIT h@1                                                                                WAIT h@1
RUN f1 (h@1)                                                                            RUN f1 (h@1)

DeepSeek-V3 pairs a forward with a backward in this way (DualPipe, arXiv:2412.19437, section 3.2.1), Domino two parts of a batch
(arXiv:2409.15241).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.ir.actions import parse_action
from autopar.ir.dependencies import dependencies
from autopar.ir.instructions import Launch, Pause, Run, Wait
from autopar.ir.schedule import Schedule, Span
from autopar.pipeline.simulate import LinkOf, Seconds


def in_turns(schedule: Schedule, seconds: Seconds, link_of: LinkOf) -> tuple[int, ...]:
    """The numbers of the instructions as they are to stand: each action and the next one in turns, where these are of two microbatches.

    Of ranks that hold a whole model: in a pipeline the other places wait for what an action sends, and would wait for longer.
    """
    before, order, end = dependencies(schedule.instructions), list[int](), 0
    for first, second in _pairs(schedule):
        lanes = range(first.begin, first.end), range(first.end, second.end)  # what lies between goes with the second
        order += [*range(end, first.begin), *_Turns(schedule, before, seconds, link_of, lanes).order()]
        end = second.end
    return (*order, *range(end, len(schedule.instructions)))


def _pairs(schedule: Schedule) -> Iterator[tuple[Span, Span]]:
    """Neighbours that work on two microbatches. The first needs nothing of the second; what the second needs of the first, a buffer that is
    carried over or the ADD before its own, it waits for."""
    spans = [span for span in schedule.spans if span.begin < span.end]
    position = 0
    while position + 1 < len(spans):
        first, second = spans[position : position + 2]
        is_paused = any(isinstance(each, Pause) for each in schedule.instructions[first.begin : second.end])
        if is_paused or parse_action(first.action).microbatch == parse_action(second.action).microbatch:
            position += 1
        else:
            yield first, second
            position += 2


@dataclass
class _Turns:
    """Two runs of instructions, each in its order, on a clock: whoever can go on first does, else who is less far."""

    schedule: Schedule
    before: Sequence[set[int]]
    seconds: Seconds
    link_of: LinkOf
    lanes: tuple[range, range]
    now: float = 0.0
    written: list[int] = field(default_factory=list[int])
    # When each link is free, and what was launched is there, by the number of its LAUNCH.
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    arrival: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        self.left = {*self.lanes[0], *self.lanes[1]}

    def order(self) -> list[int]:
        heads = [lane.start for lane in self.lanes]
        while self.left:
            _, _, lane = min(
                (self._ready(head), (head - lane.start) / len(lane), number)
                for number, (head, lane) in enumerate(zip(heads, self.lanes, strict=True))
                if head in lane
            )
            self._write(heads[lane])
            heads[lane] += 1
        return self.written

    def _ready(self, number: int) -> float:
        """When an instruction can be executed; what only starts something does so at once. Never, while it needs what is not written: of
        the first lane that is none."""
        if not self.before[number].isdisjoint(self.left):
            return float("inf")
        each = self.schedule.instructions[number]
        if isinstance(each, Wait):
            return max([self.now, *(self.arrival.get(one, 0.0) for one in self.before[number])])
        return self.now if isinstance(each, Run) else 0.0

    def _write(self, number: int) -> None:
        each = self.schedule.instructions[number]
        self.now = max(self.now, self._ready(number))
        if isinstance(each, Launch):
            link = self.link_of(each.axes)
            self.free[link] = self.arrival[number] = max(self.now, self.free[link]) + self.seconds(each)
        self.now += self.seconds(each) if isinstance(each, Run) else 0.0
        self.left.remove(number)
        self.written.append(number)
