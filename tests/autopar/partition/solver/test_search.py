"""The search against exhaustive enumeration, its folding, and what it does when there is no answer or no time."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import MemoryBudgetError, PlanError
from autopar.partition.solver.ascent import Ascent
from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem, conversion_seconds, origins, without_dominated
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import fold
from autopar.partition.solver.search import NextCandidate, search
from autopar.partition.solver.tables import Tables

STATES = "RABCU"


def cuts(state: object, other: object) -> bool:
    """R > A > B and R > C: what can be cut from what for nothing."""
    return (state, other) in {("R", "A"), ("R", "B"), ("A", "B"), ("R", "C")}


def random_problem(seed: int, num_nodes: int, integer: bool = False) -> Problem:
    """A random graph with back edges (as a parameter reads its gradient), views, random candidates and a table of prices."""
    draw = random.Random(seed)

    def cost() -> float:
        return float(draw.randrange(6)) if integer else draw.random()

    table = {(a, b): 0.0 if a == b or cuts(a, b) else cost() for a in STATES for b in STATES}
    for state in STATES[:-1]:
        table[state, "U"] = math.inf
    nodes: list[AssignmentNode] = []
    for index in range(num_nodes):
        reads = tuple((draw.randrange(num_nodes if draw.random() < 0.2 else max(1, index)), 0) for _ in range(draw.randrange(3)))
        if index == 0:
            reads = ()
        candidates = tuple(
            Candidate(tuple(draw.choice(STATES[:-1]) for _ in reads), (draw.choice(STATES),), cost()) for _ in range(draw.randrange(1, 4))
        )
        nodes.append(AssignmentNode(f"n{index}", reads, candidates))
    return Problem(tuple(nodes), lambda value, a, b: table[a, b], cuts)


def exhaustive(problem: Problem) -> float:
    evaluation = Evaluation(problem)
    return min(evaluation.seconds(picks) for picks in itertools.product(*(range(len(node.candidates)) for node in problem.nodes)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 7), st.booleans())
def test_finds_the_optimum_of_exhaustive_enumeration(seed: int, num_nodes: int, integer: bool) -> None:
    problem = random_problem(seed, num_nodes, integer)
    best = exhaustive(problem)
    found = search(problem, rounds=None)
    assert found.seconds == pytest.approx(best, rel=1e-5, abs=1e-9)
    assert Evaluation(problem).seconds(found.picks) == pytest.approx(found.seconds)
    assert found.lower_bound_seconds <= best * (1 + 1e-5) + 1e-9
    assert best < 1e-9 or found.gap < 1e-4


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9))
def test_the_folded_cost_is_the_cost_of_the_unfolded_choice(seed: int) -> None:
    problem = random_problem(seed, 6)
    twice = repeated(problem, 2)
    found = search(twice)
    assert Evaluation(twice).seconds(found.picks) == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(2 * exhaustive(problem), rel=1e-5, abs=1e-9)


def always_reachable(problem: Problem) -> Problem:
    """The problem with every result in R, from where every state can be reached."""
    nodes = [replace(node, candidates=tuple(replace(c, results=("R",)) for c in node.candidates)) for node in problem.nodes]
    return replace(problem, nodes=tuple(nodes))


def repeated(problem: Problem, copies: int) -> Problem:
    """`copies` of a problem side by side."""
    size = len(problem.nodes)
    nodes = [
        AssignmentNode(f"{node.name}_{copy}", tuple((p + copy * size, r) for p, r in node.operands), node.candidates, node.kind)
        for copy in range(copies)
        for node in problem.nodes
    ]
    return Problem(tuple(nodes), problem.price, problem.slices)


def chain_of_layers(num_layers: int) -> Problem:
    """x → up → down → x … as a transformer's MLP: `up` gives a column split for free, `down` takes one and leaves U."""
    nodes = [AssignmentNode("x", (), (Candidate((), ("R",), 0.0),), "input")]
    for layer in range(num_layers):
        up = (Candidate(("R",), ("R",), 8.0), Candidate(("R",), ("A",), 4.0))
        down = (Candidate(("R",), ("R",), 8.0), Candidate(("A",), ("U",), 4.0))
        nodes.append(AssignmentNode(f"up{layer}", ((2 * layer, 0),), up, "up"))
        nodes.append(AssignmentNode(f"down{layer}", ((2 * layer + 1, 0),), down, "down"))
    return Problem(tuple(nodes), lambda value, a, b: {("U", "R"): 1.0, ("A", "R"): 1.5}.get((a, b), 0.0 if a == b else math.inf))


def test_megatron_is_found_on_a_chain_and_layers_fold() -> None:
    problem = chain_of_layers(40)
    folded, whole = search(problem), search(problem, rounds=None)
    assert folded.seconds == pytest.approx(whole.seconds) == pytest.approx(40 * 8 + 39 * 1)
    assert all(pick == 1 for pick in folded.picks[1:])
    assert folded.num_classes < 20 < whole.num_classes
    assert folded.num_variables < whole.num_variables / 4


def test_a_transport_is_charged_once_for_all_readers() -> None:
    reader = (Candidate(("R",), ("R",), 0.0),)
    nodes = (AssignmentNode("v", (), (Candidate((), ("A",), 0.0),)), *(AssignmentNode(f"r{i}", ((0, 0),), reader) for i in range(5)))
    assert search(Problem(nodes, lambda value, a, b: 3.0 if a != b else 0.0)).seconds == pytest.approx(3.0)


def test_what_is_a_slice_of_another_needed_state_is_free() -> None:
    price = {("U", "R"): 2.0, ("U", "A"): 1.5, ("U", "B"): 1.5, ("A", "B"): 0.0}
    assert origins("U", ["B", "A", "R"], cuts) == {"R": "U", "A": "R", "B": "R"}
    assert list(origins("U", ["B", "A", "R"], cuts))[0] == "R"
    assert origins("U", ["A", "C"], cuts) == {"A": "U", "C": "U"}
    assert origins("A", ["A", "B", "C"], cuts) == {"B": "A", "C": "A"}
    assert conversion_seconds("U", ["B", "A"], cuts, lambda a, b: price[a, b]) == 1.5
    assert conversion_seconds("U", ["A", "B", "R"], cuts, lambda a, b: price[a, b]) == 2.0


def test_the_runner_up_is_priced_with_everything_else_fixed() -> None:
    problem = chain_of_layers(1)
    found = search(problem)
    evaluation = Evaluation(problem)
    # up replicated: 4 s dearer by itself, and `down` then needs A from R, which has no way.
    assert evaluation.runner_up(1, found.picks) is None
    # down replicated: 4 s dearer, gathers its input for 1.5 s.
    assert evaluation.runner_up(2, found.picks) == (0, pytest.approx(5.5))
    assert found.runner_up(2) == NextCandidate(0, pytest.approx(5.5), 1)


def test_dominated_candidates_are_dropped() -> None:
    candidates = [
        Candidate(("R",), ("R",), 2.0),
        Candidate(("R",), ("R",), 1.0),
        Candidate(("A",), ("R",), 5.0),
        Candidate(("A",), ("R",), 5.0),
    ]
    assert without_dominated(candidates) == [1, 2]


def test_no_way_at_all_is_a_plan_error() -> None:
    nodes = (AssignmentNode("v", (), (Candidate((), ("R",), 0.0),)), AssignmentNode("r", ((0, 0),), (Candidate(("U",), ("R",), 0.0),)))
    with pytest.raises(PlanError, match="no assignment is possible"):
        search(Problem(nodes, lambda value, a, b: 0.0 if a == b else math.inf))


def test_no_time_still_gives_a_legal_answer_and_its_gap() -> None:
    problem = always_reachable(random_problem(7, 60))
    rushed, calm = search(problem, rounds=None, timeout=0.0), search(problem, rounds=None)
    assert calm.seconds <= rushed.seconds < math.inf
    assert rushed.lower_bound_seconds <= calm.seconds


def test_two_searches_agree() -> None:
    problem = always_reachable(random_problem(11, 40, integer=True))
    assert search(problem).picks == search(problem).picks


def test_a_value_is_folded_by_who_reads_it() -> None:
    problem = chain_of_layers(10)
    folded = fold(problem)
    assert sum(value.count for value in folded.values) == 20
    assert sum(folded.sizes) == len(problem.nodes)


def test_time_that_runs_out_before_any_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # The ascent comes upon an answer that no value can follow.
    monkeypatch.setattr("autopar.partition.solver.ascent.Ascent.assignment", lambda self: [0, 1])
    both = (Candidate((), ("R",), 0.0), Candidate((), ("A",), 0.0))
    nodes = (AssignmentNode("v", (), both), AssignmentNode("r", ((0, 0),), tuple(replace(each, operands=each.results) for each in both)))
    with pytest.raises(PlanError, match=r"no plan found within search_timeout=0.0; give it more seconds"):
        search(Problem(nodes, lambda value, a, b: 0.0 if a == b else math.inf), timeout=0.0)


def layers_of_two_sizes(num_layers: int, capacity_bytes: float) -> Problem:
    """Layers that hold 10 bytes for 1 s or 4 for 3 s, and one that holds 6 for 1 s or 1 for 2 s."""
    layer = (Candidate((), ("R",), 1.0, 10.0, 5.0), Candidate((), ("R",), 3.0, 4.0, 5.0))
    last = (Candidate((), ("R",), 1.0, 6.0), Candidate((), ("R",), 2.0, 1.0))
    nodes = (*(AssignmentNode(f"layer {i}", (), layer, "layer") for i in range(num_layers)), AssignmentNode("last", (), last, "last"))
    return Problem(nodes, lambda value, a, b: 0.0, capacity_bytes=capacity_bytes)


def test_what_is_held_fits_into_the_capacity_at_the_least_cost() -> None:
    assert search(layers_of_two_sizes(2, 31.0)).seconds == 3.0
    tight = search(layers_of_two_sizes(2, 30.9))
    assert (tight.seconds, tight.num_bytes, tight.picks) == (4.0, 26.0, (0, 0, 1))
    tighter = search(layers_of_two_sizes(2, 25.0), rounds=None)
    assert (tighter.seconds, tighter.num_bytes) == (5.0, 25.0)
    assert tighter.gap < 1e-6


def test_nothing_that_fits_is_a_plan_error() -> None:
    with pytest.raises(MemoryBudgetError, match="no assignment fits into memory"):
        search(layers_of_two_sizes(2, 13.0))


def test_the_bound_of_the_ascent_is_no_more_than_the_answer_and_close() -> None:
    for seed in range(8):
        problem = always_reachable(random_problem(seed, 30))
        evaluation = Evaluation(problem)
        ascent = Ascent(Tables.of(evaluation))
        for _ in range(20):
            ascent.sweep(True)
            ascent.sweep(False)
        best = search(problem, rounds=None).seconds
        assert 0.95 * best <= ascent.bound() <= best * (1 + 1e-9)
        assert evaluation.seconds(ascent.assignment()) >= best * (1 - 1e-9)
