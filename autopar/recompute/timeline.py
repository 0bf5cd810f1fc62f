"""What a segment keeps, needs and takes where some of its values are computed again, without writing that program.

    backward call        0          1          2
    reads                gelu       mlp_in     norm
    again: gelu, norm    gelu'──┐              norm'─┐       a copy is there from its first reader to its last, with what it reads
    kept: mlp_in, x      mlp_in─────────┘
                         x───────────────────────────┘       what is kept is there until its last reader

The events are those of `again.computed_again`: in front of the first call of the backward that reads a copy stand it and the copies that
it reads, in the order of the forward. Changes of sharding that copies need besides are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.recompute.min_cut import KeptValue
from autopar.recompute.walk import LayerMemory

Again = frozenset[int]


@dataclass(frozen=True)
class BackwardCall:
    """A call of the backward that is no copy: the values that it reads, by number, and bytes of what the segment's backward has made for
    itself, before it and while it runs."""

    reads: tuple[int, ...]
    before_bytes: float
    during_bytes: float


@dataclass(frozen=True)
class ForwardCall:
    """A call of the forward: bytes of the segment's values while it runs and all are kept, and the values that are not read from here to
    the end of the forward."""

    live_bytes: float
    over: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """`copy_bytes` are what a copy of each value takes, `inside` what making it takes besides, `own` those that the segment makes, in
    order; what others make is kept by them. `together` are values that lie in one memory."""

    values: Sequence[KeptValue] = field(repr=False)
    copy_bytes: Sequence[float] = field(repr=False)
    own: frozenset[int] = field(repr=False)
    backward: Sequence[BackwardCall] = field(repr=False)
    forward: Sequence[ForwardCall] = field(repr=False)
    together: Sequence[Sequence[int]] = field(default=(), repr=False)
    inside: Mapping[int, float] = field(default_factory=dict[int, float], repr=False)

    def memory(self, again: Again) -> LayerMemory:
        """Where the values numbered in `again` are computed once more."""
        kept = self.kept(again)
        seconds = sum(self.values[number].seconds for number in again)
        size = sum(self.values[number].bytes for number in kept)
        return LayerMemory(size, max(self._backward_peak(again, kept), self._forward_peak(kept)), seconds)

    def kept(self, again: Again) -> Again:
        """Those of its own values that the segment keeps for its backward."""
        read = {each for number in again for each in self.values[number].reads}
        return frozenset(number for number in self.own - again if self.values[number].is_wanted or number in read)

    def _backward_peak(self, again: Again, kept: Again) -> float:
        born, last, made = dict[int, int](), dict[int, int](), list[float]()
        for call in self.backward:
            for copy in self._copies(call.reads, again, born):
                last |= dict.fromkeys(self.values[copy].reads, len(made))
                born[copy] = last[copy] = len(made)
                made.append(call.before_bytes + self.inside.get(copy, 0.0))
            last |= dict.fromkeys(call.reads, len(made))
            made.append(call.during_bytes)
        change = [0.0] * (len(made) + 1)
        for number, end in last.items():
            size = self.copy_bytes[number] if number in born else self.values[number].bytes if number in kept else 0.0
            change[born.get(number, 0)] += size
            change[end + 1] -= size
        return max(map(sum, zip(made, itertools.accumulate(change[:-1]), strict=True)), default=0.0)

    def _copies(self, reads: Iterable[int], again: Again, there: dict[int, int]) -> list[int]:
        """What is copied in front of a call, in the order of the forward; the copies in `there` stand further above."""
        found, pending = set[int](), [number for number in reads if number in again and number not in there]
        while pending:
            number = pending.pop()
            if number not in found:
                found.add(number)
                pending += [each for each in self.values[number].reads if each in again and each not in there]
        return sorted(found)

    def _forward_peak(self, kept: Again) -> float:
        peak = change = 0.0
        for call in self.forward:
            peak = max(peak, call.live_bytes + change)
            for number in call.over:
                was, wanted = number in kept, self.values[number].is_wanted
                change += (was - wanted) * self.copy_bytes[number]
        return peak

    @cached_property
    def decisions(self) -> tuple[Again, ...]:
        """The values that the backward reads and that may be computed again; those that one op gives, and those that lie in one memory, are
        decided about together."""
        first = {number: each[0] for each in self.together for number in each}
        found: dict[tuple[int, bool], set[int]] = {}
        for number in sorted(self.own):
            each = self.values[number]
            if each.is_wanted and each.seconds < math.inf:
                is_result = len(each.reads) == 1 and self.copy_bytes[each.reads[0]] == 0 and self.values[each.reads[0]].bytes == math.inf
                key = (each.reads[0], True) if is_result else (first.get(number, number), False)
                found.setdefault(key, set()).add(number)
        return tuple(frozenset(each) for each in found.values())

    def closed(self, chosen: Iterable[int]) -> Again | None:
        """`chosen` of the values that the backward reads, with what is computed again for them: all that nobody keeps. None where
        something of that cannot be."""
        chosen = set(chosen)
        found, pending = set[int](), list(chosen)
        while pending:
            number = pending.pop()
            if number in found:
                continue
            each = self.values[number]
            if each.seconds == math.inf:
                return None
            found.add(number)
            for read in each.reads:
                is_kept = read not in self.own or (self.values[read].is_wanted and read not in chosen)
                if not is_kept and (self.values[read].seconds < math.inf or self.values[read].bytes == math.inf):
                    pending.append(read)
        return frozenset(found)
