"""The arrays say what the problem says."""

from __future__ import annotations

import math

from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import fold
from autopar.partition.solver.tables import NO_WAY, Tables


def problem() -> Problem:
    """A value given whole (R) or unreduced (U), read as R and as a slice S of it."""
    giver = AssignmentNode("giver", (), (Candidate((), ("R",), 5.0), Candidate((), ("U",), 1.0, 3.0, 7.0)))
    whole = AssignmentNode("whole", ((0, 0),), (Candidate(("R",), (), 0.0),))
    part = AssignmentNode("part", ((0, 0),), (Candidate(("S",), (), 0.0), Candidate(("R",), (), 2.0)))
    price = {("U", "R"): 2.0, ("U", "S"): 1.5}
    return Problem(
        (giver, whole, part),
        lambda value, a, b: 0.0 if a == b or (a, b) == ("R", "S") else price.get((a, b), math.inf),
        lambda state, other: (state, other) == ("R", "S"),
    )


def test_a_transport_knows_its_states_prices_and_slices() -> None:
    tables = Tables.of(Evaluation(problem(), fold(problem(), None)))
    (conversion,) = tables.conversions
    assert conversion.nodes == (0, 1, 2)
    assert [states.tolist() for states in conversion.states] == [[0, 1], [0], [1, 0]]
    assert conversion.price.tolist() == [[0.0, 0.0], [2.0, 1.5]]
    assert conversion.cuts.tolist() == [[0.0, 0.0], [NO_WAY, NO_WAY]]
    assert conversion.slices.tolist() == [[0.0, 0.0], [NO_WAY, 0.0]]


def test_bytes_are_held_by_all_and_worked_with_by_one() -> None:
    tables = Tables.of(Evaluation(problem(), fold(problem(), None)))
    assert tables.num_bytes([1, 0, 0]) == 3.0 + 7.0
    assert tables.least_bytes == 0.0


def test_a_node_that_reads_its_own_class_pays_for_it_by_itself() -> None:
    ways = (Candidate(("A",), ("B",), 1.0), Candidate(("B",), ("B",), 2.0))
    chain = [AssignmentNode("layer 0", (), (Candidate((), ("B",), 0.0),), "first")]
    chain += [AssignmentNode(f"layer {i}", ((i - 1, 0),), ways, "layer") for i in range(1, 12)]
    whole = Problem(tuple(chain), lambda value, a, b: 0.0 if a == b else 10.0)
    evaluation = Evaluation(whole, fold(whole, 0))
    tables = Tables.of(evaluation)
    # Ten values go from the class to itself: dear for the first way, which needs A and gives B.
    assert tables.seconds[1].tolist() == [11 * 1.0 + 10 * 10.0, 11 * 2.0]
