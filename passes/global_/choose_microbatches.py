"""How many microbatches the program runs in: as many as were wanted, as far as they compute what the model does."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from autopar.errors import MicrobatchError
from autopar.ir.program import Program
from autopar.partition.whole_batch import MicrobatchDecision, Mixing, Statistics, mixing, refusal, shown, undivided
from autopar.pipeline.order import share_of

logger = logging.getLogger("autopar")


@dataclass(frozen=True)
class ChooseMicrobatches:
    """Run the program in `wanted` microbatches where that changes nothing that it computes, else in as many fewer as change nothing.

    With `is_asked` the number is the user's, and one that changes something is refused. With `statistics` "own" it is accepted that
    each microbatch takes its own sums and maxima where the model needs the whole batch's; what needs all samples at once has none.
    `seen` is what mixed after all in a program that was made for `wanted`: then it runs in one.

    Reads: DIMS, BATCH, the signature's batch dims. Writes: the axis of the microbatches on the program's mesh.
    """

    wanted: int
    is_asked: bool = False
    statistics: Statistics = None
    seen: tuple[Mixing, ...] = ()
    name: str = "choose microbatches"

    def decide(self, program: Program) -> MicrobatchDecision:
        """Raises `MicrobatchError` for a number that the user asked for and that changes what the model computes.

        With "own" for any number, where an op has no estimate: batch norms are written as those of a microbatch by now.
        """
        if self.wanted == 1:
            return MicrobatchDecision(1, 1)
        found = self.seen or mixing(program, self.wanted) or (() if self.is_asked else undivided(program, self.wanted))
        if not found or (self.statistics == "own" and all(each.has_estimate for each in found)):
            return MicrobatchDecision(self.wanted, self.wanted, found)
        number = 1 if self.seen else self._most(program)
        if self.is_asked or self.statistics == "own":
            raise MicrobatchError(refusal(self.wanted, number, found), () if self.is_asked else found)
        what = "%d microbatch%s instead of %d, which would change what the model computes: %s"
        logger.warning(what, number, "" if number == 1 else "es", self.wanted, "; ".join(shown(found)))
        return MicrobatchDecision(number, self.wanted, found)

    def _most(self, program: Program) -> int:
        """The largest number below the wanted one that changes nothing."""
        share = share_of(program)
        fewer = (number for number in range(self.wanted - 1, 1, -1) if share % number == 0)
        return next((number for number in fewer if not undivided(program, number) and not mixing(program, number)), 1)

    def apply(self, program: Program, decision: MicrobatchDecision) -> Program:
        return replace(program, mesh=program.mesh.with_microbatches(decision.number))
