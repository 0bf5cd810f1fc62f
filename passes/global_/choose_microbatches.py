"""How many microbatches the program runs in: as many as were wanted, as far as they compute what the model does."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, TypedDict

from autopar.errors import MicrobatchError
from autopar.ir.keys import Source
from autopar.ir.program import Program
from autopar.partition.guessed_batch import hint
from autopar.partition.whole_batch import MicrobatchDecision, Mixing, Needed, Statistics, consequence, mixing, refusal, shown, undivided
from autopar.pipeline.order import batch_sizes, ordered_for, share_of
from autopar.plans.json import Json

logger = logging.getLogger("autopar")


class WrittenMixing(TypedDict):
    """A `Mixing` as JSON."""

    node: str
    op: str
    needs: Needed
    source: dict[str, Any] | None


class WrittenNumber(TypedDict):
    """A `MicrobatchDecision` as JSON."""

    number: int
    wanted: int
    found: list[WrittenMixing]
    hint: str


@dataclass(frozen=True)
class ChooseMicrobatches:
    """Run the program in as many microbatches as its order has where that changes nothing that it computes, else in as many fewer as
    change nothing, and as each has its own samples to compute. One microbatch through one stage stays one.

    With `is_asked` the number is the user's, and one that changes something, or repeats the batch, is refused. With `statistics` "own" it
    is accepted that each microbatch takes its own sums and maxima where the model needs the whole batch's; what needs all samples at
    once has none.
    `seen` is what mixed after all in a program that was made for several: then it runs in one, as does a batch that they do not divide.

    Reads: DIMS, BATCH, the signature's batch dims, the order. Writes: the axis of the microbatches on the program's mesh, the order.
    Ensures: the number divides the batch of a rank, and microbatches compute what the whole batch does, but for what was accepted.
    """

    is_asked: bool = False
    statistics: Statistics = None
    seen: tuple[Mixing, ...] = ()
    name: str = "choose microbatches"

    def decide(self, program: Program) -> MicrobatchDecision:
        """Raises `MicrobatchError` for a number that the user asked for and that changes what the model computes, or repeats the batch.

        With "own" for any number, where an op has no estimate: batch norms are written as those of a microbatch by now.
        """
        wanted = program.order.num_microbatches
        if wanted == 1:
            return MicrobatchDecision(1, 1)
        num_shares = program.mesh.num_shares
        if any(size % (num_shares * wanted) for size in batch_sizes(program)):
            return MicrobatchDecision(1, wanted)  # a batch that could not be padded: each of them would compute all of it
        is_asked = self.is_asked or program.order.num_ranks == 1  # without a pipeline nobody runs several unasked
        shares = 1 if is_asked or self.statistics == "own" else num_shares
        found = self.seen or mixing(program, wanted) or undivided(program, wanted, shares)
        if not found or (self.statistics == "own" and all(each.has_estimate for each in found)):
            return MicrobatchDecision(wanted, wanted, found)
        number = 1 if self.seen else self._most(program, num_shares, wanted)
        if number == wanted:
            return MicrobatchDecision(wanted, wanted)
        if is_asked or self.statistics == "own":
            raise MicrobatchError(refusal(wanted, number, found, _unpadded_share(program), hint(program, found)), () if is_asked else found)
        decision = MicrobatchDecision(number, wanted, found, hint(program, found))
        what = "%d microbatch%s instead of %d, which would %s: %s"
        places = "; ".join(shown(found) + [decision.hint] * bool(decision.hint))
        logger.warning(what, number, "" if number == 1 else "es", wanted, consequence(found), places)
        return decision

    def _most(self, program: Program, num_shares: int, wanted: int) -> int:
        """The largest number up to the wanted one that changes nothing, with room for shares and microbatches in groups of one kind; where
        there is none, in groups of two (of 4 × 6 samples, 2 shares and 4 microbatches)."""
        numbers = [number for number in range(wanted, 1, -1) if share_of(program) % number == 0]
        found = ((number, shares) for shares in (num_shares, 1) for number in numbers)
        exact = cache(lambda number: not mixing(program, number))
        return next((number for number, shares in found if not undivided(program, number, shares) and exact(number)), 1)

    def apply(self, program: Program, decision: MicrobatchDecision) -> Program:
        order = ordered_for(program.order, decision.number)
        return replace(program, mesh=program.mesh.with_microbatches(decision.number), order=order)

    def written(self, program: Program, decision: MicrobatchDecision) -> dict[str, Json]:
        return asdict(decision)

    def read(self, program: Program, value: WrittenNumber) -> MicrobatchDecision:
        found: list[Mixing] = []
        for each in value["found"]:
            source = each["source"]
            found.append(Mixing(each["node"], each["op"], each["needs"], None if source is None else Source(**source)))
        return MicrobatchDecision(value["number"], value["wanted"], tuple(found), value["hint"])


def _unpadded_share(program: Program) -> int | None:
    """The samples of a rank, if it is for the microbatches alone that a batch is padded."""
    sizes, num_shares = batch_sizes(program, is_padded=False), program.mesh.num_shares
    is_for_them = sizes != batch_sizes(program) and all(size % num_shares == 0 for size in sizes)
    return min(sizes) // num_shares if is_for_them else None
