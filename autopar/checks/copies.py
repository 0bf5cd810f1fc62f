"""Invariants of what is copied to other memories and back: each buffer that comes back is proved to be the one that was put away.

one source for each target, of one shape and dtype, from the device to elsewhere or from there to the device
a target stands for what its source stands for: the same value of the same microbatch (`Buffer`), so that none is taken for another
with its copies taken out, each name in place of what it is a copy of, a schedule is the one that it was before they were written

That nothing is read before its copy is complete, nor freed before, `check_buffers` proves, as for all that is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.checks.buffers import describe, place
from autopar.checks.violation import Violation
from autopar.ir.instructions import Copy, Instruction, Wait
from autopar.ir.lifetimes import reading
from autopar.ir.schedule import Buffer, Schedule


def check_copies(rank: int, schedule: Schedule) -> list[Violation]:
    """Every COPY whose targets are not what its sources are."""
    return [
        replace(each, where=place(rank, number, instruction), instructions=((rank, number),))
        for number, instruction in enumerate(schedule.instructions)
        if isinstance(instruction, Copy)
        for each in _violations(schedule, instruction)
    ]


def _violations(schedule: Schedule, copy: Copy) -> Iterator[Violation]:
    if len(copy.sources) != len(copy.targets):
        numbers = str(len(copy.sources)), str(len(copy.targets))
        yield Violation("a copy has one target for each source", "", *numbers, "name as many targets as sources")
    for names in zip(copy.sources, copy.targets, strict=False):
        source, target = names
        given, left = (schedule.buffers.get(name) or Buffer(name) for name in names)
        if given.type is not None and left.type is not None and given.type != left.type:
            types = describe(given.type), describe(left.type)
            yield Violation(f"{target} is no copy of {source}", "", *types, "set the shape from the source")
        if left.memory != copy.memory or (given.memory == "device") == (left.memory == "device"):
            expected = f"from the device to {copy.memory}" if copy.memory != "device" else "from elsewhere to the device"
            yield Violation(f"{source} is not copied where it should be", "", expected, f"from {given.memory} to {left.memory}")
        if (given.value, given.microbatch, given.role) != (left.value, left.microbatch, left.role):
            what = f"{target} is copied from {source}, which is another value"
            yield Violation(what, "", _stands_for(left), _stands_for(given), f"copy what {target} stands for")


def _stands_for(buffer: Buffer) -> str:
    whose = "" if buffer.microbatch is None else f" of microbatch {buffer.microbatch}"
    return f"{buffer.value}{whose} ({buffer.role})"


def check_round_trips(before: Sequence[Schedule], after: Sequence[Schedule]) -> list[Violation]:
    """Where schedules do or read something else `after` copies were written than `before`, those of either left out; nothing where the
    copies are the same. By place along `pp`."""
    found: list[Violation] = []
    if all(_copies(one) == _copies(other) for one, other in zip(before, after, strict=True)):
        return found
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        there, left = [each for _, each in _without_copies(one)], _without_copies(other)
        pairs = zip(there, (each for _, each in left), strict=False)
        at = next((at for at, (was, now) in enumerate(pairs) if was != now), min(len(there), len(left)))
        if at < max(len(there), len(left)):
            was = str(there[at]) if at < len(there) else "nothing more"
            position, now = left[at] if at < len(left) else (len(other.instructions) - 1, None)
            got = "nothing more" if now is None else str(now)
            where = f"pp = {number}, instruction {position}: {other.instructions[position]}"
            found.append(Violation("with its copies taken out, the schedule is not what it was", where, was, got, "write copies alone"))
    return found


def _copies(schedule: Schedule) -> list[Copy]:
    return [each for each in schedule.instructions if isinstance(each, Copy)]


def _without_copies(schedule: Schedule) -> list[tuple[int, Instruction]]:
    """The instructions that are no copies, each with its number, as they read if everything had stayed where it was."""
    origins, copies = dict[str, str](), set[str]()
    found: list[tuple[int, Instruction]] = []
    for number, each in enumerate(schedule.instructions):
        if isinstance(each, Copy):
            origins |= {target: origins.get(source, source) for source, target in zip(each.sources, each.targets, strict=False)}
            copies.add(each.name)
        elif isinstance(each, Wait) and each.target in copies:
            copies.discard(each.target)
        else:
            found.append((number, reading(each, {name: origins[name] for name in each.reads if name in origins})))
    return found
