"""What the integer program is stopped by: the CPU time of its thread, not the clock, which other jobs of the machine turn."""

from __future__ import annotations

import math
import random
import time

import highspy
import pytest

from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import fold
from autopar.partition.solver.integer_program import IntegerProgram


def program() -> IntegerProgram:
    """Forty values, each read by the three behind it, at prices of which no two rows are alike: more than one relaxation is solved."""
    draw = random.Random(0)
    states = ("A", "B", "C")
    prices = {(one, other): 0.0 if one == other else draw.random() for one in states for other in states}
    nodes = [
        AssignmentNode(
            f"n{number}",
            tuple((other, 0) for other in range(max(0, number - 3), number)),
            tuple(Candidate(tuple(draw.choice(states) for _ in range(min(3, number))), (state,), draw.random()) for state in states * 2),
        )
        for number in range(40)
    ]
    problem = Problem(tuple(nodes), lambda value, one, other: prices[one, other])
    return IntegerProgram.of(Evaluation(problem, fold(problem)))


@pytest.mark.parametrize(
    ("cpu_seconds", "status"), [(math.inf, highspy.HighsModelStatus.kOptimal), (-1.0, highspy.HighsModelStatus.kInterrupt)]
)
def test_it_is_stopped_when_its_cpu_time_is_spent(cpu_seconds: float, status: highspy.HighsModelStatus) -> None:
    solver = program().solver(1e-7, 60.0, cpu_seconds)
    solver.run()
    assert solver.getModelStatus() == status


def test_time_in_which_others_compute_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the thread stands still: as if it had not come to run since."""
    now = time.thread_time()
    monkeypatch.setattr(time, "thread_time", lambda: now)
    solver = program().solver(1e-7, 60.0, 0.0)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
