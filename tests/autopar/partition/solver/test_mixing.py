"""Layers that are decided alike fill memory in leaps; one by one they fill it."""

from __future__ import annotations

import pytest

from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import fold
from autopar.partition.solver.mixing import mix
from autopar.partition.solver.search import search

NUM_LAYERS = 10


def layers(capacity_bytes: float) -> Problem:
    """Ten equal layers of two nodes that hang together: they hold 10 bytes for 1 s, or 2 bytes for 3 s."""
    first = (Candidate((), ("A",), 1.0, 10.0), Candidate((), ("B",), 3.0, 2.0))
    second = (Candidate(("A",), (), 0.0), Candidate(("B",), (), 0.0))
    nodes: list[AssignmentNode] = []
    for layer in range(NUM_LAYERS):
        nodes += [
            AssignmentNode(f"first {layer}", (), first, "first"),
            AssignmentNode(f"second {layer}", ((2 * layer, 0),), second, "second"),
        ]
    return Problem(tuple(nodes), lambda value, a, b: 0.0 if a == b else 100.0, capacity_bytes=capacity_bytes)


def test_as_many_layers_as_fit_take_the_fast_way() -> None:
    problem = layers(60.0)
    evaluation = Evaluation(problem, fold(problem))
    mixed = mix(evaluation, small=[1, 1], large=[0, 0])
    assert mixed is not None
    # 20 bytes if all are small; five layers of 8 bytes more fit.
    assert mixed.seconds == 5 * 1.0 + 5 * 3.0
    assert mixed.evaluation.num_bytes(mixed.picks) == 60.0
    assert all(mixed.picks[2 * layer] == mixed.picks[2 * layer + 1] for layer in range(NUM_LAYERS)), "a layer changes as a whole"


def test_nothing_to_mix_where_no_part_fits() -> None:
    problem = layers(21.0)
    assert mix(Evaluation(problem, fold(problem)), small=[1, 1], large=[0, 0]) is None


def test_a_search_decides_folded_layers_one_by_one_when_memory_asks_for_it() -> None:
    found = search(layers(60.0))
    assert (found.seconds, found.num_bytes) == (20.0, 60.0)
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    assert found.seconds_per_byte == pytest.approx(2.0 / 8.0, rel=0.01), "a byte more would save this"
