"""What a rank holds while it runs its schedule, instruction by instruction, from the schedule alone: no clock is needed.

Buffers are counted by the memory they lie in: a fragment's result that is a view of its input, or of another result, takes
none of its own. What a fragment needs within itself is counted where `Sizes` says it. What a collective needs while it is under
way is counted where arrivals are those of processes, which keep the memory of each bucket from one step to the next:

    all_reduce       in the bucket, which its results are views of
    all_gather       into memory that goes at the WAIT, when results are copied out of it
    reduce_scatter   from memory that goes at the WAIT into the bucket, which its results are views of

Over gloo, where `Sizes` says so, what a reduce-scatter adds up arrives beside what is sent, and what is small is gathered in memory of its
own; that goes at the WAIT, too.

What an optimizer holds is not counted. What lies in host memory or in files, because a COPY parks it or from the start, is counted
apart: it takes none of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autopar.cost.buffer_kinds import Kind
from autopar.cost.memory_walk import Walk
from autopar.cost.rank_memory import RankMemory, Sizes
from autopar.ir.instructions import Instruction
from autopar.ir.lifetimes import with_frees
from autopar.ir.schedule import Schedule


def peak_bytes(schedule: Schedule) -> int:
    """The most that a rank holds after any instruction, its inputs included. Raises `ScheduleError` for a buffer of unknown size."""
    return int(schedule_memory(schedule).peak_bytes)


def peak_bytes_on_processes(schedule: Schedule, over_gloo: bool = False) -> int:
    """Likewise of a schedule without its FREEs yet, on a process of its own."""
    groups = with_frees(schedule.instructions, {*schedule.inputs, *schedule.outputs})
    return int(schedule_memory(schedule, Sizes(schedule.bytes_of, arrival="launch", over_gloo=over_gloo), groups).peak_bytes)


def schedule_memory(schedule: Schedule, sizes: Sizes | None = None, groups: Iterable[Sequence[Instruction]] | None = None) -> RankMemory:
    """The memory of a rank over its instructions; sizes are those of the types of its buffers unless `sizes` says others.

    `groups` are instructions that count as one step, those of the schedule with what frees its buffers (`autopar.ir.lifetimes`); by
    default each is a step of its own.
    """
    walk = Walk(schedule, sizes or Sizes(schedule.bytes_of))
    return walk.run(((each,) for each in schedule.instructions) if groups is None else groups)


class Held(NamedTuple):
    """A piece of memory, and the buffers that lie in it; of what is no buffer there are none."""

    kind: Kind
    bytes: float
    names: tuple[str, ...]


def held_at(schedule: Schedule, sizes: Sizes, position: int) -> tuple[Held, ...]:
    """What there is once the instruction at `position` is over."""
    walk = Walk(schedule, sizes)
    walk.run((each,) for each in schedule.instructions[: position + 1])
    names: dict[int, list[str]] = {}
    for name, memory in walk.memory.items():
        if memory not in walk.parked:
            names.setdefault(memory, []).append(name)
    found = (Held(walk.kind_of[memory], walk.bytes_of[memory], tuple(each)) for memory, each in names.items())
    return (Held("optimizer", sizes.held_bytes, ()), Held("inputs", sizes.given_bytes, ()), *found)
