"""Which instructions of a schedule must come before which: any order that meets this computes the same, bit by bit.

RUN f (a) -> (b)          b is read by g
LAUNCH all_reduce sum dp (b) -> c
RUN g (b) -> (d)          may stand before the LAUNCH
WAIT c                    may stand anywhere between its LAUNCH and h
RUN h (c, d) -> (e)

FREEs, which follow from the rest, are left out, and so are UPDATEs, which are written after all else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.ir.instructions import Add, Copy, Flight, Free, Instruction, Launch, Pause, Receive, Send, Update, Wait


def dependencies(instructions: Sequence[Instruction]) -> list[set[int]]:
    """By instruction the numbers of earlier ones that it follows directly. Raises `ScheduleError` for a FREE or an UPDATE.

    What reads a buffer follows all that write it, a WAIT its launch, and an ADD the one into the same sum before it, so that sums are
    added up in one order. Transfers of one channel keep their order, which is that of the other end. Nothing passes PAUSE.
    """
    walk = _Walk(instructions)
    return [walk.visit(number, each) for number, each in enumerate(instructions)]


@dataclass
class _Walk:
    instructions: Sequence[Instruction]
    writers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    flights: dict[str, int] = field(default_factory=dict[str, int])
    # The latest transfer of each channel, and PAUSE if it was there.
    channels: dict[tuple[type, str, int], int] = field(default_factory=dict[tuple[type, str, int], int])
    pause: set[int] = field(default_factory=set[int])

    def visit(self, number: int, each: Instruction) -> set[int]:
        """What the `number`-th instruction follows."""
        if isinstance(each, (Free, Update)):
            raise ScheduleError(f"instruction {number}, {each}: only what has no FREE and no UPDATE yet can be put into another order")
        before = {writer for name in each.reads for writer in self.writers[name]} | self.pause
        if isinstance(each, Pause):
            self.pause = {number}
            return set(range(number))
        if isinstance(each, Wait):
            launched = self.flights[each.target]
            self.write(number, self.instructions[launched].writes)
            return before | {launched}
        if isinstance(each, (Launch, Copy, Send, Receive)):
            self.flights[each.name] = number
            return before | self.channel(number, each)
        if isinstance(each, Add):
            before |= set(self.writers[each.target])
        self.write(number, each.writes)
        return before

    def channel(self, number: int, each: Flight) -> set[int]:
        """The transfer before this one on its channel, if it is one."""
        if isinstance(each, (Launch, Copy)):
            return set()
        key = type(each), each.axis, each.peer
        before = {self.channels[key]} if key in self.channels else set[int]()
        self.channels[key] = number
        return before

    def write(self, number: int, names: Sequence[str]) -> None:
        for name in names:
            self.writers[name].append(number)
