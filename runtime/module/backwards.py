"""What ranks tell each other of backward, which a rank may leave out, while the others wait for it in the middle of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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

    def of_next_call(self, check: TangentCheck) -> tuple[Callable[[Tangents], bool], Callable[[], None]]:
        """What is called before, with its tangents, and after the backward of a call that begins."""
        self.num_calls += 1
        return partial(self._meet, self.num_calls, check), self._one_more

    def begin_anew(self) -> None:
        self.number = self.num_calls = 0

    def _meet(self, call: int, check: TangentCheck, tangents: Tangents) -> bool:
        """In any order but that of all ranks, backward would add up what belongs to several calls. Whether all begin from what `number_of`
        does not tell apart."""
        place = f"how often backward ran, with this one: {self.number + 1}"
        are_equal = self.world.meet(f"backward of call {call}", place, number_of(tangents))
        check.of(tangents, self.world, are_equal)
        return are_equal

    def _one_more(self) -> None:
        self.number += 1
