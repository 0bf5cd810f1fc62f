"""Orders of instructions drawn at random, any that are legal."""

from __future__ import annotations

import random

from autopar.ir.dependencies import dependencies
from autopar.ir.instructions import Receive, Send, Wait
from autopar.pipeline.schedule_program import ScheduleProgram


def random_orders(program: ScheduleProgram, seed: int) -> tuple[tuple[int, ...], ...]:
    """By place along `pp` some order that meets all dependencies, those of other places among them: a transfer is waited for once both
    ends have launched it, in the one order in which all places together run."""
    generator = random.Random(seed)
    rows = [schedule.instructions for schedule in program.places]
    before = [dependencies(row) for row in rows]
    orders: list[list[int]] = [[] for _ in rows]
    launched: set[tuple[str, bool]] = set()
    transfers = {each.name for row in rows for each in row if isinstance(each, (Send, Receive))}

    def is_ready(place: int, number: int) -> bool:
        each = rows[place][number]
        if isinstance(each, Wait) and each.target in transfers and not {(each.target, True), (each.target, False)} <= launched:
            return False
        return before[place][number].issubset(orders[place])

    left = [set(range(len(row))) for row in rows]
    while any(left):
        place, number = generator.choice(
            [(place, number) for place, numbers in enumerate(left) for number in numbers if is_ready(place, number)]
        )
        each = rows[place][number]
        if isinstance(each, (Send, Receive)):
            launched.add((each.name, isinstance(each, Send)))
        orders[place].append(number)
        left[place].remove(number)
    return tuple(map(tuple, orders))
