"""A step on paper: when everything starts and ends, how long ranks idle, what is held when, what it all waits for.

A grid of whole actions and a finished program are run alike: one of the ranks at each place along `pp`, which all do the same at the same
time. It has a compute stream, one for the collectives over each set of axes, and one for the copies to each memory; each directed pair of
places has a communication stream. A transfer starts once both ends have launched it and the one before it on its channel is over, a
collective once those before it on its axes are; a WAIT lasts until its end; launches take no time but what the host takes. So, where
transfers are shorter than actions, an action starts at max(rank free, producer's end + communication).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost.rank_memory import RankMemory
from autopar.cost.schedule_memory import schedule_memory
from autopar.errors import ScheduleError
from autopar.ir.actions import Action, PipelineSchedule, Reduction
from autopar.ir.instructions import Channel, Copy, Instruction, Launch, Receive, Run, Send, Wait
from autopar.ir.turns import take_turns
from autopar.pipeline.cost import PipelineCost, grid_memory
from autopar.pipeline.expand import expand
from autopar.pipeline.schedule_program import ScheduleProgram

# What a RUN takes, and what goes from a SEND, LAUNCH or COPY to its end.
Seconds = Callable[[Run | Send | Launch | Copy], float]
# Which link the collectives over some axes take.
LinkOf = Callable[[tuple[str, ...]], str]
# What an instruction takes of the rank beside what it computes or launches.
HostOf = Callable[[Instruction], float]
# The share of their time that collectives over some axes take from what a rank computes meanwhile (`Link.busy`).
BusyOf = Callable[[tuple[str, ...]], float]
# What computes is left at least this share of the device.
_LEAST_LEFT = 0.1
# So much of each end of the critical path is printed.
_SHOWN = 12


@dataclass(frozen=True)
class Event:
    """Something that took time: an action or a fragment on the stream "compute", a transfer on the sender's "to rank N", a collective on
    that of its axes, "dp,tp", a copy on "to host" or "to device", the reduction of a grid on "reduce"."""

    rank: int
    stream: str
    name: str
    start_seconds: float
    end_seconds: float
    # The event that ended when this one could start, as an index into all events; -1 for the first.
    cause: int = -1


@dataclass(frozen=True)
class Simulation:
    """One step. Times in seconds from its start, memory in bytes."""

    events: tuple[Event, ...]
    memory: tuple[RankMemory, ...]
    # Per rank, when each of its instructions was over.
    instruction_seconds: tuple[tuple[float, ...], ...]

    def _compute(self, rank: int) -> list[Event]:
        return [event for event in self.events if event.rank == rank and event.stream == "compute"]

    @cached_property
    def step_seconds(self) -> float:
        """From the first start to the last end on any rank (makespan)."""
        ends = (event.end_seconds for event in self.events)
        return max(*(row[-1] for row in self.instruction_seconds if row), *ends, 0.0, 0.0)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Per rank, seconds of compute."""
        return tuple(sum(event.end_seconds - event.start_seconds for event in self._compute(rank)) for rank in range(len(self.memory)))

    @cached_property
    def span_seconds(self) -> tuple[float, ...]:
        """Per rank, from the start of its first action to the end of its last: what a step takes where steps follow without a barrier."""
        rows = [self._compute(rank) for rank in range(len(self.memory))]
        return tuple(row[-1].end_seconds - row[0].start_seconds if row else 0.0 for row in rows)

    @property
    def bubble_rate(self) -> float:
        """The share of the longest span that ranks idle, on average; uneven stages count as idleness too."""
        return self._idle_share(max(self.span_seconds, default=0.0))

    @property
    def makespan_bubble_rate(self) -> float:
        """The same share of the whole step."""
        return self._idle_share(self.step_seconds)

    def _idle_share(self, seconds: float) -> float:
        return 1 - sum(self.busy_seconds) / (len(self.memory) * seconds) if seconds else 0.0

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        return tuple(each.peak_bytes for each in self.memory)

    @property
    def peak_live_microbatches(self) -> tuple[int, ...]:
        return tuple(each.peak_live_microbatches for each in self.memory)

    @property
    def critical_path(self) -> tuple[Event, ...]:
        """The events that the end of the step waits for, first to last: shorten one of these or nothing."""
        if not self.events:
            return ()
        at = max(range(len(self.events)), key=lambda index: self.events[index].end_seconds)
        path: list[Event] = []
        while at >= 0:
            path.append(self.events[at])
            at = self.events[at].cause
        return tuple(reversed(path))

    def __str__(self) -> str:
        shares = f"bubble {self.bubble_rate:.2%} of the longest span, {self.makespan_bubble_rate:.2%} of the step"
        lines = [f"step {self.step_seconds:.6g} s, {shares}"]
        for rank, memory in enumerate(self.memory):
            busy = f"busy {self.busy_seconds[rank]:.6g} s of {self.span_seconds[rank]:.6g} s"
            held = f"peak {memory.peak_bytes:.6g} bytes, at most {memory.peak_live_microbatches} live microbatches"
            lines.append(f"rank {rank}: {busy}, {held}")
        names = [event.name for event in self.critical_path]
        if len(names) > 2 * _SHOWN:
            names = [*names[:_SHOWN], f"… {len(names) - 2 * _SHOWN} more …", *names[-_SHOWN:]]
        return "\n".join([*lines, f"critical path: {' '.join(names)}"])


def simulate(
    pipeline: PipelineSchedule | ScheduleProgram,
    prices: PipelineCost | Seconds,
    link_of: LinkOf = ",".join,
    has_memory: bool = True,
    busy_of: BusyOf = lambda axes: 0.0,
    host_of: HostOf = lambda each: 0.0,
) -> Simulation:
    """Run `pipeline` on paper: a grid at the prices of its stages, a program that is written out at those of its instructions
    (`autopar.pipeline.fragment_prices`). Raises `ScheduleError` where ranks would wait for ever; `check_pipeline` says why.

    One collective at a time goes over each link; by default each set of axes has a link of its own. While one is under way, fragments are
    slowed down by its share of the device, `busy_of` its axes. What an instruction takes of the host, `host_of` it, keeps its rank beside
    what it launches, and is no event. Without `has_memory` nothing is said of memory."""
    if isinstance(prices, PipelineCost):
        program = expand(pipeline, tuple(prices.edges)) if isinstance(pipeline, PipelineSchedule) else pipeline
        run, memory = _Run(program, grid_seconds(program, prices)), grid_memory(program, prices)
    else:
        program = expand(pipeline) if isinstance(pipeline, PipelineSchedule) else pipeline
        run = _Run(program, prices, link_of, busy_of, host_of)
        memory = tuple(schedule_memory(each) if has_memory else RankMemory((), 0.0) for each in program.places)
    run.finish()
    return Simulation(tuple(run.events), memory, tuple(map(tuple, run.ended)))


def grid_seconds(program: ScheduleProgram, cost: PipelineCost) -> Seconds:
    """The price of each instruction of a grid: of actions and reductions those of their stages, of a SEND that of its edge."""

    def seconds(instruction: Run | Send | Launch | Copy) -> float:
        assert not isinstance(instruction, (Launch, Copy)), "stages of a grid have no collectives of their own"
        if isinstance(instruction, Send):
            return cost.transfer(program.transfers[instruction.transfer]).seconds
        action = program.actions[instruction.fragment]
        return cost.action_seconds(action) if isinstance(action, Action) else cost.stages[action.stage].reduce_seconds

    return seconds


@dataclass
class _Stamp:
    """A moment on a rank, and the event that brought it about."""

    seconds: float = 0.0
    cause: int = -1


@dataclass
class _Run:
    """Ranks are places along `pp`, which is what transfers go along."""

    program: ScheduleProgram
    seconds: Seconds
    link_of: LinkOf = ",".join
    busy_of: BusyOf = lambda axes: 0.0
    host_of: HostOf = lambda each: 0.0
    events: list[Event] = field(default_factory=list[Event])
    # Of each channel: launches of sends, launches of receives, ends of transfers; the k-th belong together.
    sends: dict[Channel, list[_Stamp]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[Channel, list[Send]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[Channel, list[_Stamp]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[Channel, list[_Stamp]] = field(default_factory=lambda: defaultdict(list))
    # By rank and transfer.
    launched: dict[tuple[int, str], tuple[Channel, int]] = field(default_factory=dict[tuple[int, str], tuple[Channel, int]])
    # By rank and collective or copy, and by rank and link the last one's, when it is over.
    collectives: dict[tuple[int, str], _Stamp] = field(default_factory=dict[tuple[int, str], _Stamp])
    streams: dict[tuple[int, str], _Stamp] = field(default_factory=dict[tuple[int, str], _Stamp])
    # By rank the collectives that take a share of its device: begin, end, share.
    busy: dict[int, list[tuple[float, float, float]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.rows = [schedule.instructions for schedule in self.program.places]
        self.now = [_Stamp() for _ in self.rows]
        self.reduced = [_Stamp() for _ in self.rows]
        self.ended: list[list[float]] = [[] for _ in self.rows]

    def finish(self) -> None:
        """Let every rank run until it blocks, in turn, until all are through."""
        rows = dict(enumerate(self.rows))
        at = dict.fromkeys(rows, 0)
        if not take_turns(rows, self.step, at):
            places = ", ".join(f"rank {rank} at {row[at[rank]]}" for rank, row in rows.items() if at[rank] < len(row))
            raise ScheduleError(f"the pipeline never ends, nobody can advance: {places}; check_pipeline says why")

    def step(self, rank: int, each: Instruction) -> bool:
        """Run one instruction; False for a WAIT of which some end is not launched yet."""
        if isinstance(each, Run):
            self.compute(rank, each)
        elif isinstance(each, (Send, Receive)):
            self.launch(rank, each)
        elif isinstance(each, Launch):
            self.collect(rank, each)
        elif isinstance(each, Copy):
            self.fly(rank, each, f"to {each.memory}", f"to {each.memory}")
        elif isinstance(each, Wait):
            end = self.end_of(rank, each.target)
            if end is None:
                return False
            self.now[rank] = _later(self.now[rank], end)
        if seconds := self.host_of(each):
            now = self.now[rank]
            self.now[rank] = _Stamp(now.seconds + self.slowed(rank, now.seconds, seconds), now.cause)
        self.ended[rank].append(self.now[rank].seconds)
        return True

    def compute(self, rank: int, each: Run) -> None:
        """Actions run one after another; a reduction runs beside them, after those before it."""
        if not isinstance(self.program.action_of(each), Reduction):
            seconds = self.slowed(rank, self.now[rank].seconds, self.seconds(each))
            self.now[rank] = self.event(rank, "compute", each.fragment, self.now[rank], seconds)
        elif seconds := self.seconds(each):
            begin = _later(self.now[rank], self.reduced[rank])
            self.reduced[rank] = self.event(rank, "reduce", each.fragment, begin, seconds)

    def slowed(self, rank: int, begin: float, seconds: float) -> float:
        """What `seconds` of the whole device become from `begin` on, beside collectives under way, all of which are known by then."""
        flights = self.busy[rank] = [each for each in self.busy[rank] if each[1] > begin]
        now, left = begin, seconds
        for until in sorted({moment for each in flights for moment in each[:2] if moment > begin}):
            rate = max(1 - sum(share for start, end, share in flights if start <= now < end), _LEAST_LEFT)
            if left <= rate * (until - now):
                return now + left / rate - begin
            now, left = until, left - rate * (until - now)
        return now + left - begin

    def launch(self, rank: int, each: Send | Receive) -> None:
        is_send = isinstance(each, Send)
        channel = (rank, each.peer) if is_send else (each.peer, rank)
        row = (self.sends if is_send else self.receives)[channel]
        self.launched[rank, each.transfer] = (channel, len(row))
        row.append(self.now[rank])
        if is_send:
            self.sent[channel].append(each)

    def collect(self, rank: int, each: Launch) -> None:
        """A collective among ranks at one place along `pp`, which launch it together."""
        if "pp" in each.axes:
            raise ScheduleError(f"{each}: a collective along pp has ranks that do not launch it together, and is not simulated")
        self.fly(rank, each, ",".join(each.axes), self.link_of(each.axes))
        if share := self.busy_of(each.axes):
            event = self.events[-1]
            self.busy[rank].append((event.start_seconds, event.end_seconds, share))

    def fly(self, rank: int, each: Launch | Copy, stream: str, link: str) -> None:
        begin = _later(self.now[rank], self.streams.get((rank, link), _Stamp()))
        self.streams[rank, link] = self.collectives[rank, each.name] = self.event(rank, stream, each.name, begin, self.seconds(each))

    def end_of(self, rank: int, target: str) -> _Stamp | None:
        """When what a rank launched under a name is over; None while some end of it is not launched."""
        if (rank, target) in self.collectives:
            return self.collectives[rank, target]
        place = self.launched.get((rank, target))
        return self.ends[place[0]][place[1]] if place is not None and self.complete(*place) else None

    def complete(self, channel: Channel, number: int) -> bool:
        """Whether the `number`-th transfer of `channel` has met; those before it go first."""
        sends, receives, ends = self.sends[channel], self.receives[channel], self.ends[channel]
        while len(ends) <= number and len(ends) < min(len(sends), len(receives)):
            begin = _later(sends[len(ends)], receives[len(ends)])
            begin = _later(begin, ends[-1]) if ends else begin
            send = self.sent[channel][len(ends)]
            ends.append(self.event(channel[0], f"to rank {channel[1]}", send.transfer, begin, self.seconds(send)))
        return number < len(ends)

    def event(self, rank: int, stream: str, name: str, begin: _Stamp, seconds: float) -> _Stamp:
        self.events.append(Event(rank, stream, name, begin.seconds, begin.seconds + seconds, begin.cause))
        return _Stamp(begin.seconds + seconds, len(self.events) - 1)


def _later(one: _Stamp, other: _Stamp) -> _Stamp:
    return other if other.seconds > one.seconds else one
