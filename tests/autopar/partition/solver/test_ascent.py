"""What the ascent leaves out beforehand; its bound and answers are tested with the search."""

from __future__ import annotations

import math

import numpy as np

from autopar.partition.solver.ascent import Ascent
from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.tables import Tables


def chain(last: str) -> Tables:
    """A value in A or B goes through a node that keeps its state to a reader that needs `last`; nothing changes state."""
    first = AssignmentNode("first", (), (Candidate((), ("A",), 1.0), Candidate((), ("B",), 2.0)))
    middle = AssignmentNode(
        "middle", ((0, 0),), (Candidate(("A",), ("A",), 0.0), Candidate(("B",), ("B",), 0.0), Candidate(("C",), ("C",), 0.0))
    )
    reader = AssignmentNode("reader", ((1, 0),), (Candidate((last,), (), 0.0),))
    problem = Problem((first, middle, reader), lambda value, a, b: 0.0 if a == b else math.inf)
    return Tables.of(Evaluation(problem))


def test_candidates_that_no_assignment_can_have_are_left_out_all_along_the_chain() -> None:
    ascent = Ascent(chain("B"))
    assert [positions.tolist() for positions in ascent.positions] == [[1], [1], [0]]
    assert not ascent.is_impossible
    assert ascent.bound() == 2.0
    assert ascent.assignment() == [1, 1, 0]


def test_nothing_is_left_where_nothing_is_possible() -> None:
    assert Ascent(chain("C")).is_impossible
    alone = Candidate((), ("A",), 0.0)
    reads = [AssignmentNode(f"reader {number}", ((0, 0),), (Candidate((state,), (), 0.0),)) for number, state in enumerate("BAB")]
    problem = Problem((AssignmentNode("first", (), (alone,)), *reads), lambda value, a, b: 0.0 if a == b else math.inf)
    assert Ascent(Tables.of(Evaluation(problem))).is_impossible


def test_what_is_not_allowed_is_left_out_and_its_like() -> None:
    tables = chain("A")
    allowed = [np.ones(len(each), dtype=bool) for each in tables.seconds]
    allowed[0][0] = False
    assert Ascent(tables, allowed).is_impossible
    assert allowed[1].all(), "the masks are the caller's"


def test_prices_are_by_all_candidates() -> None:
    ascent = Ascent(chain("B"))
    ascent.add([np.array([0.0, 5.0]), np.zeros(3), np.zeros(1)])
    assert ascent.bound() == 7.0
