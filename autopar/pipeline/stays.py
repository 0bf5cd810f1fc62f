"""Memories that may be away from the device between two of their uses, and when they are copied out and back.

RUN f3 (x) -> (h)                  left: nobody uses h behind it
COPY host (h) -> (h.host)
RUN f4 …                           out: on its way
WAIT h.host
FREE h
RUN …                              away: h takes no memory of the device
COPY device (h.host) -> (h.back)
RUN g4 …                           coming back
WAIT h.back
RUN g3 (h.back, …)                 needed

Copies out and copies back have a link each, which carries one at a time. Of what is on its way out, and of what is back before it is
needed, there are a few at most: these are the staging buffers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost.rank_memory import Sizes
from autopar.cost.schedule_memory import held_at
from autopar.ir.instructions import Copy, Instruction, Launch, Memory, Receive, Send, Wait
from autopar.ir.lifetimes import reading, touched
from autopar.ir.schedule import Buffer, Schedule

# What is copied back starts so many times its own duration before it is needed: clocks on paper are not exact.
SLACK = 2.0
# How many of the largest memories are on their way at a time.
STAGED = 2


class Stay(NamedTuple):
    """A memory of `num_bytes` that nobody uses behind instruction `left` and before instruction `needed`; `names` are the buffers in it
    that are there before and after."""

    names: tuple[str, ...]
    num_bytes: float
    left: int
    needed: int


class Trip(NamedTuple):
    """What becomes of a `Stay`: before which instructions stand COPY out and its WAIT, COPY back, and its WAIT."""

    names: tuple[str, ...]
    out: int
    gone: int
    back: int
    needed: int


@dataclass(frozen=True)
class Trips:
    """By place along `pp` what is away in `memory`, and when; `reasons` say how much that is, and what the peak is without and with it.
    `fits` unless a rank holds more than it may although all is moved that helps."""

    memory: Memory
    places: tuple[tuple[Trip, ...], ...]
    reasons: tuple[str, ...] = ()
    fits: bool = True

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def stays(schedule: Schedule, starts: Sequence[float], least_bytes: float) -> list[Stay]:
    """Of each memory that holds saved values, and nothing that is given or handed out, the longest time that nobody uses it.

    `schedule` has no FREEs; `starts` is when its instructions begin.
    """
    kept, uses = {*schedule.inputs, *schedule.outputs}, uses_of(schedule.instructions)
    found: list[Stay] = []
    for held in held_at(schedule, Sizes(schedule.bytes_of, arrival="launch"), len(schedule.instructions) - 1):
        if held.bytes < least_bytes or not held.names or not _may_move(schedule, held.names, kept):
            continue
        spans = sorted(span for name in held.names for span in uses[name])
        left, needed = _longest(spans, starts)
        names = [name for name in held.names if any(end <= left for _, end in uses[name]) and any(at >= needed for at, _ in uses[name])]
        if names and left + 1 < needed:
            found.append(Stay(tuple(names), held.bytes, left, needed))
    return found


def _may_move(schedule: Schedule, names: Iterable[str], kept: set[str]) -> bool:
    """A bucket, a sum, a parameter and what lies in its memory stay."""
    roles = [schedule.buffers[name].role if name in schedule.buffers else "sum" for name in names]
    return "saved" in roles and kept.isdisjoint(names) and set(roles) <= {"saved", "value"}


def uses_of(instructions: Sequence[Instruction]) -> dict[str, list[tuple[int, int]]]:
    """By buffer the instructions that it is used during: one, or those from a launch to its WAIT."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    under_way: dict[str, tuple[int, tuple[str, ...]]] = {}
    for number, each in enumerate(instructions):
        if isinstance(each, (Launch, Copy, Send, Receive)):
            under_way[each.name] = number, touched(each)
            continue
        begin, names = under_way.pop(each.target) if isinstance(each, Wait) else (number, touched(each))
        for name in names:
            found[name].append((begin, number))
    return found


def _longest(spans: Sequence[tuple[int, int]], starts: Sequence[float]) -> tuple[int, int]:
    """The end of a use and the begin of the next one, between which there is most time."""
    best, gap, end = (-1, -1), -1.0, spans[0][1]
    for begin, last in spans[1:]:
        if begin > end + 1 and starts[begin] - starts[end + 1] > gap:
            best, gap = (end, begin), starts[begin] - starts[end + 1]
        end = max(end, last)
    return best


def staging_bytes(chosen: Iterable[Stay]) -> float:
    """So much of them is on its way out, and so much on its way back, at most."""
    return STAGED * max((each.num_bytes for each in chosen), default=0.0)


def trips(chosen: Sequence[Stay], starts: Sequence[float], seconds: Callable[[float], float]) -> list[Trip]:
    """When each is copied; those that would come back before they are gone stay.

    `seconds` is what a copy of so many bytes takes. One that was not over by the clock is waited for when the next ones need its place.
    """
    staging = staging_bytes(chosen)
    gone, back = _gone(chosen, starts, seconds, staging), coming(chosen, starts, seconds, staging)
    found = [Trip(each.names, each.left + 1, gone[each], max(back[each], gone[each]), each.needed) for each in chosen]
    return [each for each in found if each.gone < each.needed]


def _gone(chosen: Sequence[Stay], starts: Sequence[float], seconds: Callable[[float], float], staging: float) -> dict[Stay, int]:
    """By stay the instruction before which its copy out is waited for."""
    found: dict[Stay, int] = {}
    link, flying = 0.0, list[Stay]()
    for each in sorted(chosen, key=lambda one: (one.left, one.needed)):
        out = each.left + 1
        flying = [one for one in flying if found[one] > out]
        while flying and sum(one.num_bytes for one in flying) + each.num_bytes > staging:
            found[flying.pop(0)] = out
        link = max(link, starts[out]) + seconds(each.num_bytes)
        found[each] = max(bisect_left(starts, link), out)
        flying.append(each)
    return found


def coming(chosen: Iterable[Stay], starts: Sequence[float], seconds: Callable[[float], float], staging: float) -> dict[Stay, int]:
    """By stay the instruction before which its copy back starts, so that it is over in time, and no more than `staging` bytes are back
    before they are needed."""
    latest, link = dict[Stay, float](), float("inf")
    ordered = sorted(chosen, key=lambda one: (one.needed, one.left))
    for each in reversed(ordered):
        latest[each] = link = min(starts[each.needed], link) - SLACK * seconds(each.num_bytes)
    found: dict[Stay, int] = {}
    here, back = list[Stay](), 0
    for each in ordered:
        back = max(back, bisect_right(starts, latest[each]) - 1)
        here = [one for one in here if one.needed > back]
        while here and sum(one.num_bytes for one in here) + each.num_bytes > staging:
            back = min(one.needed for one in here)
            here = [one for one in here if one.needed > back]
        found[each] = min(back, each.needed)
        here.append(each)
    return found


def waiting_seconds(chosen: Sequence[Trip], starts: Sequence[float], seconds: Callable[[Trip], float]) -> float:
    """What a rank waits for these copies, each direction carrying one at a time; `starts` is when instructions begin without them."""
    stops: list[tuple[int, int, Trip]] = []
    for each in chosen:  # the order of `copied`: at an instruction WAITs for copies out stand before COPYs out, and so on
        stops += [(each.gone, 0 if each.gone > each.out else 2, each), (each.out, 1, each), (each.back, 3, each), (each.needed, 4, each)]
    waited, ends, links = 0.0, dict[tuple[Trip, bool], float](), {True: 0.0, False: 0.0}
    for number, kind, trip in sorted(stops):
        now, is_out = starts[number] + waited, kind < 3
        if kind in (1, 3):
            ends[trip, is_out] = links[is_out] = max(links[is_out], now) + seconds(trip)
        else:
            waited += max(ends[trip, is_out] - now, 0.0)
    return waited


@dataclass(frozen=True)
class Names:
    """What the buffers of a trip to `memory` are called meanwhile, and afterwards."""

    memory: Memory

    def away(self, name: str) -> str:
        return f"{name}.{self.memory}"

    @staticmethod
    def back(name: str) -> str:
        return f"{name}.back"

    def table(self, schedule: Schedule, names: Iterable[str]) -> dict[str, Buffer]:
        """What these names stand for."""
        buffers = {name: schedule.buffers[name] for name in names}
        away = {self.away(name): each._replace(memory=self.memory) for name, each in buffers.items()}
        return away | {self.back(name): each for name, each in buffers.items()}


def moved(schedule: Schedule, chosen: Sequence[Trip], memory: Memory) -> Schedule:
    """`schedule`, which has no FREEs, with its copies; readers behind them read what came back."""
    table = Names(memory).table(schedule, (name for each in chosen for name in each.names))
    return replace(schedule.regrouped(copied(schedule, chosen, memory)), buffers={**schedule.buffers, **table})


def copied(schedule: Schedule, chosen: Sequence[Trip], memory: Memory) -> list[list[Instruction]]:
    """Each instruction, with the copies and WAITs before it."""
    names, groups = Names(memory), [[each] for each in schedule.instructions]
    needed = {name: each.needed for each in chosen for name in each.names}
    for number, group in enumerate(groups):
        group[0] = reading(group[0], {name: names.back(name) for name in touched(group[0]) if needed.get(name, number + 1) <= number})
    before: list[list[Instruction]] = [[] for _ in groups]
    leaving = sorted(chosen, key=lambda each: (each.out, each.gone, each.needed))
    for each in leaving:  # a WAIT goes first: it makes room
        if each.gone > each.out:
            before[each.gone].append(Wait(names.away(each.names[0])))
    for each in leaving:
        copy = Copy(memory, each.names, tuple(map(names.away, each.names)))
        before[each.out] += [copy] if each.gone > each.out else [copy, Wait(copy.name)]
    coming = sorted(chosen, key=lambda each: (each.back, each.needed, each.out))
    for each in coming:
        before[each.back].append(Copy("device", tuple(map(names.away, each.names)), tuple(map(names.back, each.names))))
    for each in coming:
        before[each.needed].append(Wait(names.back(each.names[0])))
    return [[*ahead, *group] for ahead, group in zip(before, groups, strict=True)]
