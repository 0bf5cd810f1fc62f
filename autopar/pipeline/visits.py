"""When parameters that lie in host memory, or in files, are on the device.

COPY device (w) -> (w.here1)        on its way
RUN f0 …
WAIT w.here1
RUN f1 (x, w.here1) -> (h)          needed
RUN f2 (h, w.here1) -> (k)          the last that reads it for a while
FREE w.here1
RUN f3 …                            w takes no memory of the device
COPY device (w) -> (w.here2)        for the backward

Nothing is copied out: the parameter itself stays where it is. No copy is there, or under way, at a PAUSE, where the caller may do anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.ir.instructions import Copy, Instruction, Memory, Pause, Wait
from autopar.ir.lifetimes import reading, touched
from autopar.ir.schedule import Buffer, Schedule
from autopar.pipeline.stays import Stay, coming, uses_of

# A stay on the device, from the first instruction that reads it to the last.
Span = tuple[int, int]


class Visit(NamedTuple):
    """Of the parameter in buffer `name`: before which instructions stand its COPY and its WAIT, and which is the last that reads it."""

    name: str
    copied: int
    needed: int
    last: int


@dataclass(frozen=True)
class Visits:
    """By place along `pp` when the parameters, which lie in `memory`, are on the device; `reasons` say what that takes, and what the peak
    is without and with it."""

    memory: Memory
    places: tuple[tuple[Visit, ...], ...]
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def parameters_of(schedule: Schedule) -> list[str]:
    """The buffers of its parameters."""
    return [name for item, name in zip(schedule.signature.inputs, schedule.inputs, strict=True) if item.kind == "parameter"]


def pauses_of(schedule: Schedule) -> list[int]:
    return [number for number, each in enumerate(schedule.instructions) if isinstance(each, Pause)]


def read_spans(schedule: Schedule) -> dict[str, list[Span]]:
    """By parameter when it is read; `schedule` has no UPDATEs. One that is a result itself is there from its first reader on, or from
    PAUSE."""
    uses, last = uses_of(schedule.instructions), len(schedule.instructions) - 1
    found = {name: sorted(uses[name]) for name in parameters_of(schedule) if uses[name]}
    for name in set(parameters_of(schedule)).intersection(schedule.outputs):
        found[name] = [(min([*pauses_of(schedule), last, *(begin for begin, _ in found.get(name, ()))]), last)]
    return found


def joined(spans: Sequence[Span], is_short: Callable[[Span, Span], bool]) -> list[Span]:
    """With those together between which the parameter stays, since the time `is_short`."""
    found = [spans[0]]
    for each in spans[1:]:
        if each[0] <= found[-1][1] + 1 or is_short(found[-1], each):
            found[-1] = found[-1][0], max(found[-1][1], each[1])
        else:
            found.append(each)
    return found


def visits(
    schedule: Schedule,
    spans: Mapping[str, Sequence[Span]],
    starts: Sequence[float],
    seconds: Callable[[float], float],
    ahead_bytes: float,
) -> list[Visit]:
    """When each is copied for these stays on the device.

    `starts` is when instructions begin, `seconds` what a copy of so many bytes takes. No more than `ahead_bytes` are there, or on their
    way, before they are needed, but for what the same instruction needs.
    """
    wanted: dict[Stay, tuple[str, int]] = {}
    pauses = pauses_of(schedule)
    for name, stays in spans.items():
        left = -1
        for begin, last in stays:
            left = max(left, *(pause for pause in pauses if pause < begin), -1)
            wanted[Stay((name,), schedule.bytes_of(name), left, begin)] = name, last
            left = last
    back = coming(wanted, starts, seconds, ahead_bytes)
    return [Visit(name, max(back[stay], stay.left + 1), stay.needed, last) for stay, (name, last) in wanted.items()]


def most_needed_bytes(schedule: Schedule, spans: Mapping[str, Sequence[Span]]) -> float:
    """The most that comes to the device for one instruction: the parameters of a layer."""
    found: dict[int, float] = defaultdict(float)
    for name, begin in ((name, begin) for name, stays in spans.items() for begin, _ in stays):
        found[begin] += schedule.bytes_of(name)
    return max(found.values(), default=0.0)


def visited(schedule: Schedule, chosen: Iterable[Visit], memory: Memory) -> Schedule:
    """`schedule`, which has no FREEs, with its parameters in `memory` and these copies of them, which are read in their place."""
    chosen = sorted(chosen, key=lambda one: (one.copied, one.needed))
    groups: list[list[Instruction]] = [[each] for each in schedule.instructions]
    before: list[list[Instruction]] = [[] for _ in groups]
    waits: list[list[Instruction]] = [[] for _ in groups]
    left = {name: copy for name, copy, _ in _named(chosen) if name in schedule.outputs}
    for name, copy, each in _named(chosen):
        before[each.copied].append(Copy("device", (name,), (copy,)))
        waits[each.needed].append(Wait(copy))
        for number in range(each.needed, each.last + 1):
            if name in touched(groups[number][-1]):
                groups[number] = [reading(groups[number][-1], {name: copy})]
    written = [[*ahead, *ready, *group] for ahead, ready, group in zip(before, waits, groups, strict=True)]
    outputs = tuple(left.get(name, name) for name in schedule.outputs)
    return replace(schedule.regrouped(written), outputs=outputs, buffers={**schedule.buffers, **table_of(schedule, chosen, memory)})


def table_of(schedule: Schedule, chosen: Iterable[Visit], memory: Memory) -> dict[str, Buffer]:
    """What the buffers of parameters in `memory`, and of these copies, stand for."""
    copies = {copy: schedule.buffers[name]._replace(memory="device") for name, copy, _ in _named(chosen)}
    return copies | {name: schedule.buffers[name]._replace(memory=memory) for name in parameters_of(schedule)}


def _named(chosen: Iterable[Visit]) -> Iterable[tuple[str, str, Visit]]:
    """The buffer of each parameter, and that of its copy."""
    numbers: dict[str, int] = defaultdict(int)
    for each in chosen:
        numbers[each.name] += 1
        yield each.name, f"{each.name}.here{numbers[each.name]}", each
