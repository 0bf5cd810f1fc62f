"""Incumbents, the assignments found so far, as lines over the price of a byte: the best price to try next, and what meets there.

One that holds h bytes costs seconds + price · (h - spare) where a byte has a price. At each price the cheapest of all
incumbents is the Lagrangian bound; the cheapest of those known is no less. Where that is highest, an incumbent that fits meets one
that does not (the cutting planes of J. E. Kelley, SIAM 1960, in one dimension).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Incumbent:
    """An assignment: class picks, what they cost without any price, the bytes held beyond what is to spare (or fewer), whether they
    fit."""

    picks: tuple[int, ...]
    seconds: float
    excess_bytes: float
    fits: bool

    def priced(self, price: float) -> float:
        return self.seconds + price * self.excess_bytes


@dataclass
class Incumbents:
    """Those that fit, and those that hold too much. One that is over the capacity only by its working bytes is dropped: a price on held
    bytes cannot tell it from one that fits."""

    known: list[Incumbent] = field(default_factory=list[Incumbent])

    def add(self, incumbent: Incumbent) -> None:
        if incumbent.seconds < math.inf and (incumbent.fits or incumbent.excess_bytes > 0) and incumbent not in self.known:
            self.known.append(incumbent)

    def cheapest(self, price: float) -> float:
        """The least that one of them costs at this price of a byte."""
        return min((incumbent.priced(price) for incumbent in self.known), default=math.inf)

    @property
    def has_fitting(self) -> bool:
        return any(incumbent.fits for incumbent in self.known)

    def best_price(self) -> float:
        """Where the cheapest is dearest. One that fits is among them."""
        price = 0.0
        here = min(self.known, key=lambda incumbent: (incumbent.seconds, incumbent.excess_bytes))
        while here.excess_bytes > 0:
            smaller = [incumbent for incumbent in self.known if incumbent.excess_bytes < here.excess_bytes]
            before = here
            here = min(smaller, key=lambda incumbent: (_meeting(before, incumbent), incumbent.excess_bytes))
            price = _meeting(before, here)
        return price

    def ends(self, price: float) -> tuple[Incumbent, Incumbent] | None:
        """The cheapest at this price that fits, and the cheapest that does not."""
        sides = [[incumbent for incumbent in self.known if incumbent.fits == fits] for fits in (True, False)]
        small, large = (min(side, key=lambda incumbent: incumbent.priced(price), default=None) for side in sides)
        return (small, large) if small and large else None


def _meeting(large: Incumbent, small: Incumbent) -> float:
    return (small.seconds - large.seconds) / (large.excess_bytes - small.excess_bytes)
