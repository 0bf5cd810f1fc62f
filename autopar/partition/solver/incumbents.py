"""Answers found so far, as lines over the price of a byte: the best price to try next, and what meets there.

An answer that holds h bytes costs seconds + price · (h - spare) where a byte has a price. At each price the cheapest of all
answers is the Lagrangian bound; the cheapest of those known is no less. Where that is highest, an answer that fits meets one
that does not (the cutting planes of J. E. Kelley, SIAM 1960, in one dimension).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Answer:
    """Class picks, what they cost without any price, the bytes held beyond what is to spare (or fewer), and whether they fit."""

    picks: tuple[int, ...]
    seconds: float
    excess_bytes: float
    fits: bool

    def priced(self, price: float) -> float:
        return self.seconds + price * self.excess_bytes


@dataclass
class Answers:
    """Those that fit, and those that hold too much; what fits in all but its working bytes has no price that tells it from others."""

    known: list[Answer] = field(default_factory=list[Answer])

    def add(self, answer: Answer) -> None:
        if answer.seconds < math.inf and (answer.fits or answer.excess_bytes > 0) and answer not in self.known:
            self.known.append(answer)

    def cheapest(self, price: float) -> float:
        """The least that one of them costs at this price of a byte."""
        return min((answer.priced(price) for answer in self.known), default=math.inf)

    @property
    def has_fitting(self) -> bool:
        return any(answer.fits for answer in self.known)

    def best_price(self) -> float:
        """Where the cheapest is dearest. One that fits is among them."""
        price = 0.0
        here = min(self.known, key=lambda answer: (answer.seconds, answer.excess_bytes))
        while here.excess_bytes > 0:
            smaller = [answer for answer in self.known if answer.excess_bytes < here.excess_bytes]
            before = here
            here = min(smaller, key=lambda answer: (_meeting(before, answer), answer.excess_bytes))
            price = _meeting(before, here)
        return price

    def ends(self, price: float) -> tuple[Answer, Answer] | None:
        """The cheapest at this price that fits, and the cheapest that does not."""
        sides = [[answer for answer in self.known if answer.fits == fits] for fits in (True, False)]
        small, large = (min(side, key=lambda answer: answer.priced(price), default=None) for side in sides)
        return (small, large) if small and large else None


def _meeting(large: Answer, small: Answer) -> float:
    return (small.seconds - large.seconds) / (large.excess_bytes - small.excess_bytes)
