"""What schedules may hold: the budget less the optimizer's state, but never less than they held before."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from autopar.cost.memory import MemoryBudget, OptimizerKind
from autopar.cost.schedule_budget import ScheduleBudget
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Schedule
from tests.support.schedules import retyped, schedule_of

UNIT = 4 * 4  # bytes of a buffer


def of(text: str) -> Schedule:
    weight = Input("parameter", "w", (4,), torch.float32, True)
    schedule = schedule_of(text, "w", "y", Signature((weight,), ()))
    return replace(retyped(schedule, {name: ((4,), torch.float32) for name in schedule.buffers}), fragments={})


SHORT, LONG = of("RUN f (w) -> (y)"), of("RUN f (w) -> (a, b)\nRUN f (a, b) -> (y)")


def test_the_state_of_the_optimizer_is_no_buffer() -> None:
    for units, fits in ((6, True), (5, False)):  # of LONG four live at once: w, a, b, y; AdamW holds two
        budget = ScheduleBudget([SHORT], MemoryBudget(units * UNIT, OptimizerKind("adamw", 2, 0)))
        assert budget.allows([LONG]) == fits
    assert ScheduleBudget([SHORT], MemoryBudget(4 * UNIT, OptimizerKind("sgd", 0, 0))).allows([LONG])


def test_what_arrives_over_gloo_counts_where_it_speaks() -> None:
    """A sum of all that is asked about: w, of two ranks, its part of it, and what arrives for it."""
    half = {"y": ((2,), torch.float32)}
    before, scattered = retyped(SHORT, half), retyped(of("LAUNCH reduce_scatter sum dp (w) -> y\nWAIT y"), half)
    for over_gloo, units, fits in ((False, 3, True), (True, 4, False), (True, 5, True)):
        budget = MemoryBudget(units * UNIT / 2, OptimizerKind("sgd", 0, 0), over_gloo=over_gloo)
        assert ScheduleBudget([before], budget).allows([scattered]) == fits, (over_gloo, units)


def test_what_was_held_before_may_be_held() -> None:
    assert ScheduleBudget([LONG], MemoryBudget(1.0)).allows([LONG]) and not ScheduleBudget([SHORT], MemoryBudget(1.0)).allows([LONG])


def test_without_a_limit_nothing_is_looked_at() -> None:
    unknown = schedule_of("RUN f (x) -> (y)", "x", "y")
    assert ScheduleBudget([unknown], MemoryBudget(math.inf)).allows([unknown])
