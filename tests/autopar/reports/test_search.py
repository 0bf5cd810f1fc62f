"""What is said of a search: gap, what was dropped, memory; a search that was stopped is never called optimal."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem
from autopar.partition.solver.search import Solution, search
from autopar.reports.search import search_lines, search_summary
from tests.support.models.residual import parallel_residual


@dataclass(frozen=True)
class Decision:
    solution: Solution
    sharding_problem: Any
    per: str = "a step"
    num_places: int = 1

    @property
    def budget_bytes(self) -> float:
        return self.sharding_problem.problem.capacity_bytes


@dataclass(frozen=True)
class Asked:
    problem: Problem
    strategies: list[tuple[str, ...]]


def decision(capacity: float = math.inf, **changes: Any) -> Decision:
    """Fast and large, or slow and small."""
    candidates = (Candidate(("a",), ("a",), 1.0, 2e9), Candidate(("a",), ("b",), 3.0, 1e9))
    nodes = (AssignmentNode("w", (), (Candidate((), ("a",), 0.0),)), AssignmentNode("x", ((0, 0),), candidates))
    problem = Problem(nodes, lambda value, source, target: 0.0, capacity_bytes=capacity)
    return Decision(replace(search(problem), **changes), Asked(problem, [("a",), ("a", "b")]))


def test_without_a_budget() -> None:
    proved, held = search_lines(decision())
    assert proved.startswith("proved: at most 0.00 % above the best plan; dropped: 0 strategies")
    assert held == "holds 2.0 GB a rank, with gradients and optimizer state; no memory_budget"


def test_with_a_budget_a_byte_has_a_price() -> None:
    found = decision(1.5e9, seconds_per_byte=2e-9)
    assert list(search_lines(found))[1] == "holds 1.0 GB of memory_budget=1.5 GB; 1.0 GB more would save about 2 s a step"
    summary = search_summary(found)
    assert summary is not None and summary["seconds"] == 3.0 and summary["held_bytes"] == 1e9 and summary["budget_bytes"] == 1.5e9
    assert list(search_lines(replace(found, solution=replace(found.solution, seconds_per_byte=0.0))))[1].endswith(
        "; more would save nothing"
    )


@pytest.mark.parametrize(
    ("bound", "known"), [(0.8, "at most 25.00 % above the best plan"), (-math.inf, "nothing is proved of the best plan")]
)
def test_a_search_that_was_stopped_is_the_best_so_far(bound: float, known: str) -> None:
    found = decision(lower_bound_seconds=bound, is_timed_out=True)
    assert next(search_lines(found)).startswith(f"stopped by search_timeout, best so far: {known}; ")
    assert "proved:" not in "".join(search_lines(found))


def test_of_a_pipeline_memory_is_that_of_its_ranks_and_time_that_of_a_microbatch() -> None:
    piped = replace(decision(), per="a microbatch", num_places=2)
    assert list(search_lines(piped))[1].startswith("holds 2.0 GB on 2 ranks of a pipeline together, with gradients and ")
    limited = replace(decision(1.5e9, seconds_per_byte=2e-9), per="a microbatch", num_places=2)
    expected = "holds 1.0 GB of memory_budget of 2 stages' ranks=1.5 GB; 1.0 GB more would save about 2 s a microbatch"
    assert list(search_lines(limited))[1] == expected


def test_a_plan_is_not_called_the_best() -> None:
    first = parallel_residual()
    again = parallel_residual(plan=first.plan)
    assert "proved: at most" in first.explain(detail="all") and "proved:" not in again.explain(detail="all")
    assert "every op has one strategy, by the plan or because there is no other: nothing was searched" in again.explain(detail="all")


def test_the_summary_is_json() -> None:
    found = parallel_residual(search_timeout=0.0).summary()["search"]
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert found["is_timed_out"] and found["budget_bytes"] is None and found["num_strategies"] > 100
    assert list(search_lines(None)) == []
