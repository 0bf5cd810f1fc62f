"""Mixes two assignments of a folded problem, a fast one and one that fits into memory, by deciding equal layers one by one.

As long as every layer saves a value or none does, memory changes in large steps. The assignments differ in some nodes; those that
are connected (of one layer, say) change together, and as many of these parts are changed as fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx

from autopar.partition.solver.assignment import Problem
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import fold


@dataclass(frozen=True)
class Mixture:
    """An assignment of the problem without folding."""

    evaluation: Evaluation
    picks: list[int]
    seconds: float


def mix(evaluation: Evaluation, small: Sequence[int], large: Sequence[int]) -> Mixture | None:
    """`small` fits, `large` does not; class picks. The parts that save most seconds a byte go first; None where no part fits."""
    problem, folded = evaluation.problem, evaluation.folded
    alone = Evaluation(problem, fold(problem, None))
    picks, wanted = ([each[number] for number in folded.class_of] for each in (small, large))
    parts = _parts(problem, [index for index, pick in enumerate(picks) if pick != wanted[index]])
    known: dict[tuple[int, ...], tuple[float, float]] = {}
    priced: list[tuple[float, float, list[int]]] = []
    for part in parts:
        kind = tuple(sorted(folded.class_of[index] for index in part))
        if kind not in known:
            known[kind] = alone.saved_seconds(part, picks, wanted), _held(problem, wanted, part) - _held(problem, picks, part)
        priced.append((*known[kind], part))
    everything = range(len(picks))
    found, held, working = list(picks), _held(problem, picks, everything), _working(problem, picks, everything)
    for saved, more, part in sorted(priced, key=lambda each: -each[0] / max(each[1], 1.0)):
        most = max(working, _working(problem, wanted, part))
        if saved > 0 and held + more + most <= problem.capacity_bytes:
            held, working = held + more, most
            for index in part:
                found[index] = wanted[index]
    return Mixture(alone, found, alone.seconds(found)) if found != picks else None


def _parts(problem: Problem, nodes: list[int]) -> list[list[int]]:
    """`nodes` in groups that read from one another, directly or through others of them; a value's readers are one group."""
    graph = networkx.Graph()
    graph.add_nodes_from(nodes)
    for (producer, _), readers in problem.consumers().items():
        networkx.add_path(graph, [index for index in (producer, *(reader for reader, _ in readers)) if index in graph])
    return [sorted(part) for part in networkx.connected_components(graph)]


def _held(problem: Problem, picks: Sequence[int], nodes: Iterable[int]) -> float:
    return sum(problem.nodes[index].candidates[picks[index]].held_bytes for index in nodes)


def _working(problem: Problem, picks: Sequence[int], nodes: Iterable[int]) -> float:
    return max(problem.nodes[index].candidates[picks[index]].working_bytes for index in nodes)
