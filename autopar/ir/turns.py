"""Ranks that run in turn, each as far as it can: what comes out does not depend on whose turn it is where nobody takes anything away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Who = TypeVar("Who")
Item = TypeVar("Item")


def take_turns(rows: Mapping[Who, Sequence[Item]], step: Callable[[Who, Item], bool], at: dict[Who, int]) -> bool:
    """Do the items of each row in order, of one row until `step` says that its next must wait, until none of all rows can be done.

    `step` does an item, or leaves all as it is and returns False. `at` says how far each row is; it is kept up to date, and `step` may
    look at it. Whether all rows came to their ends.
    """
    moved = True
    while moved:
        moved = False
        for who, row in rows.items():
            while at[who] < len(row) and step(who, row[at[who]]):
                at[who] += 1
                moved = True
    return all(at[who] == len(row) for who, row in rows.items())
