"""Merging views: what is merged, what is not, and that nothing is lost."""

from __future__ import annotations

from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem
from autopar.partition.solver.contraction import contract
from autopar.partition.solver.search import search

PRICES = {("A", "B"): 2.0, ("B", "A"): 2.0, ("U", "A"): 1.0, ("U", "B"): 1.0}


def price(value: tuple[int, int], source: object, target: object) -> float:
    return 0.0 if source == target else PRICES.get((source, target), float("inf"))  # type: ignore[call-overload]


def node(name: str, reads: tuple[int, ...], *candidates: tuple[str, str, float], is_view: bool = False) -> AssignmentNode:
    """Candidates are (states needed, state given, seconds): one letter for each operand."""
    return AssignmentNode(
        name, tuple((producer, 0) for producer in reads), tuple(Candidate(tuple(o), (r,), s) for o, r, s in candidates), name, is_view
    )


VIEW = (("A", "A", 0.0), ("B", "B", 0.0))


def test_a_chain_of_views_becomes_part_of_its_reader() -> None:
    nodes = (
        node("source", (), ("", "A", 1.0), ("", "B", 3.0)),
        node("view", (0,), *VIEW, is_view=True),
        node("again", (1,), *VIEW, is_view=True),
        node("reader", (2,), ("B", "B", 1.0)),
    )
    contracted = contract(Problem(nodes, price))
    assert [each.name for each in contracted.problem.nodes] == ["source", "reader"]
    assert contracted.problem.nodes[1].operands == ((0, 0),)
    assert contracted.group_of == (0, 1, 1, 1)
    assert contracted.original([1, 0]) == [1, 1, 1, 0]
    assert search(Problem(nodes, price)).picks in ((0, 1, 1, 0), (1, 1, 1, 0))


def test_a_view_of_several_readers_becomes_part_of_its_producer() -> None:
    nodes = (
        node("source", (), ("", "A", 1.0), ("", "B", 3.0)),
        node("view", (0,), *VIEW, is_view=True),
        node("left", (1,), ("A", "A", 1.0)),
        node("right", (1,), ("B", "B", 1.0)),
    )
    contracted = contract(Problem(nodes, price))
    assert [each.name for each in contracted.problem.nodes] == ["view", "left", "right"]
    assert contracted.problem.nodes[0].operands == ()
    assert contracted.original([0, 0, 0]) == [0, 0, 0, 0]
    assert search(Problem(nodes, price)).seconds == 1.0 + 2.0 + 1.0 + 1.0


def test_a_state_that_cannot_pass_the_view_keeps_it_apart() -> None:
    """The reader needs U, which the view cannot give; the producer gives U, which the view cannot take."""
    nodes = (
        node("source", (), ("", "U", 1.0)),
        node("view", (0,), *VIEW, is_view=True),
        node("reader", (1,), ("U", "A", 1.0), ("B", "B", 9.0)),
    )
    assert len(contract(Problem(nodes, price)).problem.nodes) == 3


def test_a_reader_that_reads_the_view_twice_is_left_alone() -> None:
    nodes = (
        node("source", (), ("", "A", 1.0)),
        node("other", (0,), ("A", "A", 1.0)),
        node("view", (0,), *VIEW, is_view=True),
        node("square", (2, 2), ("AA", "A", 1.0)),
    )
    assert len(contract(Problem(nodes, price)).problem.nodes) == 4


def test_an_op_that_is_no_view_is_left_alone() -> None:
    nodes = (node("source", (), ("", "A", 1.0)), node("op", (0,), *VIEW), node("reader", (1,), ("A", "A", 1.0)))
    assert len(contract(Problem(nodes, price)).problem.nodes) == 3
