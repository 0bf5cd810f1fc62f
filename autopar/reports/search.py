"""How a plan was found: what the search proved, what it left out, and what memory had to do with it.

search: 812 nodes in 96 classes, 4021 variables: 12.3 ms a step, found in 0.41 s
  proved to be at most 0.02 % above the best; dropped: 310 strategies that others dominate, 1204 that the bound rules out
  holds 31.2 GB of memory_budget=40.0 GB; 1.0 GB more would save 12 µs a step
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypedDict

from autopar.ir.units import in_bytes, in_seconds
from autopar.plans.decisions import ShardingDecision

_GIGABYTE = 1e9


class SearchSummary(TypedDict):
    """A decision of the search as a dict that goes to JSON. What has no limit is None.

    seconds          of a step (several microbatches: of one, through all stages), the optimizer's update included;
                     lower_bound_seconds: no plan takes less
    gap              0.01: at most one per cent above the best plan; is_timed_out: search_timeout ended the search
    num_strategies   of all nodes together, of which num_dominated are no better than another in anything, and num_bounded (of one
                     node for each class of equal ones) cannot be in a plan as good as this
    held_bytes       what counts against budget_bytes, of all places along `pp` together; seconds_per_byte: what a byte more would save
    """

    seconds: float
    lower_bound_seconds: float | None
    gap: float | None
    is_timed_out: bool
    search_seconds: float
    num_strategies: int
    num_dominated: int
    num_bounded: int
    held_bytes: float
    budget_bytes: float | None
    seconds_per_byte: float


def search_summary(decision: ShardingDecision) -> SearchSummary:
    found = decision.solution
    return {
        "seconds": found.seconds,
        "lower_bound_seconds": _finite(found.lower_bound_seconds),
        "gap": _finite(found.gap),
        "is_timed_out": found.is_timed_out,
        "search_seconds": found.search_seconds,
        "num_strategies": sum(len(each) for each in decision.sharding_problem.strategies),
        "num_dominated": found.num_dominated,
        "num_bounded": found.num_bounded,
        "held_bytes": found.num_bytes,
        "budget_bytes": _finite(decision.budget_bytes),
        "seconds_per_byte": found.seconds_per_byte,
    }


def search_lines(decision: ShardingDecision | None) -> Iterator[str]:
    """What was proved and dropped, and memory; nothing where nothing was searched."""
    if decision is None:
        return
    found = search_summary(decision)
    dropped = f"dropped: {found['num_dominated']} strategies that others dominate, {found['num_bounded']} that the bound rules out"
    if _is_given(decision):
        yield "every op has one strategy, by the plan or because there is no other: nothing was searched"
    else:
        yield f"{_proved(found['gap'], found['is_timed_out'])}; {dropped}"
    if found["budget_bytes"] is None:
        whose = "a rank" if decision.num_places == 1 else f"on {decision.num_places} ranks of a pipeline together"
        yield f"holds {in_bytes(found['held_bytes'])} {whose}, with gradients and optimizer state; no memory_budget"
    else:
        more = in_seconds(_GIGABYTE * found["seconds_per_byte"])
        is_worth = found["seconds_per_byte"] > 0
        price = f"{in_bytes(_GIGABYTE)} more would save about {more} {decision.per}" if is_worth else "more would save nothing"
        budget = "memory_budget" if decision.num_places == 1 else f"memory_budget of {decision.num_places} stages' ranks"
        yield f"holds {in_bytes(found['held_bytes'])} of {budget}={in_bytes(found['budget_bytes'])}; {price}"


def _is_given(decision: ShardingDecision) -> bool:
    """Whether the search had no op to decide upon. Inputs that no plan fixes (a batch, a buffer) follow from the ops."""
    return all(len(node.candidates) == 1 for node in decision.sharding_problem.problem.nodes if node.operands)


def _proved(gap: float | None, is_timed_out: bool) -> str:
    """What is known of the best plan. A search that was stopped never claims it."""
    known = "nothing is proved of the best plan" if gap is None else f"at most {100 * gap:.2f} % above the best plan"
    return f"stopped by search_timeout, best so far: {known}" if is_timed_out else f"proved: {known}" if gap is not None else known


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
