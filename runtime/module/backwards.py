"""What ranks tell each other of backward, which a rank may leave out, while the others wait for it in the middle of theirs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.runtime.execute.host_group import UnequalError
from autopar.runtime.execute.world import World
from autopar.runtime.module.tangents import TangentCheck, Tangents, number_of


@dataclass
class Backwards:
    """How often backward ran through calls of one module, and how many calls there were. Who counts holds this alone, not the module."""

    world: World
    number: int = 0
    num_calls: int = 0

    @property
    def place(self) -> str:
        return f"how often backward ran: {self.number}"

    def of_next_call(self, check: TangentCheck) -> BackwardMeeting:
        self.num_calls += 1
        return BackwardMeeting(self, self.num_calls, check)

    def begin_anew(self) -> None:
        self.number = self.num_calls = 0


@dataclass(frozen=True)
class BackwardMeeting:
    """Of all ranks, before the backward of a `call`: in any order but that of all ranks it would add up what belongs to several calls."""

    backwards: Backwards
    call: int
    check: TangentCheck

    def begin(self, tangents: Tangents) -> None:
        place = f"how often backward ran, with this one: {self.backwards.number + 1}"
        self.backwards.world.expect_meeting(f"backward of call {self.call}", place, number_of(tangents))

    def end(self, tangents: Tangents) -> bool:
        try:
            self.backwards.world.hear()
            are_equal = True
        except UnequalError:
            are_equal = False
        self.check.of(tangents, self.backwards.world, are_equal)
        return are_equal

    def is_over(self) -> None:
        self.backwards.number += 1
