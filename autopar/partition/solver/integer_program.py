"""The assignment problem as an integer program whose linear relaxation is nearly integral, for HiGHS.

Columns, per class of nodes and per folded value:

    x[class, candidate]           1 where the candidate is taken                             (binary)
    e[reader, source, target]     1 where the reader has the value from source in target     (follows from x)
    f[value, source, target]      1 where the value is brought from source to target         (follows from e)

Rows, with given[s] = Σ x of the producer's candidates that give s, and needed[r, t] = Σ x of the reader's that need t:

    Σ_t e[r, s, t] = given[s],  Σ_s e[r, s, t] = needed[r, t]            a transport problem for each reader: tight
    e[r, s, t] ≤ f[s, t] + Σ f[s, h] over the h that t is a slice of     several readers pay once
    f[s, h] ≤ Σ_r e[r, s, h]                                             a state is brought for a reader, not to be cut alone

A value with one reader has e = f. With a capacity, w stands for the largest working bytes:

    working bytes of x ≤ w for each class,    Σ held bytes of x + w ≤ capacity
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from autopar.partition.solver.assignment import State
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import FoldedValue

# Costs are scaled so that a typical solution costs about this much: far above the solver's absolute tolerances (1e-7).
_TYPICAL_OBJECTIVE = 1e4
_INTEGRAL = 1e-6


@dataclass
class IntegerProgram:
    """Columns, rows and entries of the program, as growing lists that become arrays once."""

    scale: float
    offsets: list[int]
    num_binary: int
    costs: list[float] = field(default_factory=list[float])
    lower: list[float] = field(default_factory=list[float])
    upper: list[float] = field(default_factory=list[float])
    rows: list[int] = field(default_factory=list[int])
    columns: list[int] = field(default_factory=list[int])
    entries: list[float] = field(default_factory=list[float])

    @staticmethod
    def of(evaluation: Evaluation) -> IntegerProgram:
        nodes, sizes = evaluation.nodes, evaluation.folded.sizes
        typical = sum(size * min(c.seconds for c in node.candidates) for node, size in zip(nodes, sizes, strict=True))
        counts = [len(node.candidates) for node in nodes]
        offsets = [0, *np.cumsum(counts).tolist()]
        model = IntegerProgram(_TYPICAL_OBJECTIVE / typical if typical > 0 else 1.0, offsets, offsets[-1])
        for number, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
            model.costs += [model.scale * size * candidate.seconds for candidate in node.candidates]
            model.row(1.0, 1.0, [(column, 1.0) for column in range(offsets[number], offsets[number + 1])])
        for value in evaluation.folded.values:
            _Conversion(model, evaluation, value).add()
        if evaluation.problem.capacity_bytes < math.inf:
            model._add_capacity(evaluation)
        return model

    def _add_capacity(self, evaluation: Evaluation) -> None:
        """Bytes in units of the capacity."""
        capacity = evaluation.problem.capacity_bytes
        working = self.column(0.0)
        total = [(working, 1.0)]
        least = max(min(each.working_bytes for each in node.candidates) for node in evaluation.nodes)
        self.row(least / capacity, math.inf, [(working, 1.0)])
        for number, (node, size) in enumerate(zip(evaluation.nodes, evaluation.folded.sizes, strict=True)):
            columns = list(enumerate(node.candidates, start=self.offsets[number]))
            total += [(column, size * each.held_bytes / capacity) for column, each in columns if each.held_bytes]
            if any(each.working_bytes > least for each in node.candidates):
                self.row(-math.inf, 0.0, [(working, -1.0)] + [(column, each.working_bytes / capacity) for column, each in columns])
        self.row(-math.inf, 1.0, total)

    def column(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def row(self, lower: float, upper: float, entries: Sequence[tuple[int, float]]) -> None:
        number = len(self.lower)
        self.lower.append(lower)
        self.upper.append(upper)
        # A node that reads its own result has columns on both sides; the solver takes each column once in a row.
        merged: dict[int, float] = {}
        for column, entry in entries:
            merged[column] = merged.get(column, 0.0) + entry
        for column, entry in merged.items():
            self.rows.append(number)
            self.columns.append(column)
            self.entries.append(entry)

    def linear_program(self) -> highspy.HighsLp:
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.costs), len(self.lower)
        program.col_cost_ = np.array(self.costs)
        program.col_lower_, program.col_upper_ = np.zeros(len(self.costs)), np.ones(len(self.costs))
        program.row_lower_, program.row_upper_ = np.array(self.lower), np.array(self.upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.searchsorted(np.array(self.rows), np.arange(program.num_row_ + 1)).astype(np.int32)
        program.a_matrix_.index_ = np.array(self.columns, dtype=np.int32)
        program.a_matrix_.value_ = np.array(self.entries)
        program.integrality_ = [highspy.HighsVarType.kInteger] * self.num_binary + [highspy.HighsVarType.kContinuous] * (
            len(self.costs) - self.num_binary
        )
        return program

    def solver(self, tolerance: float, seconds: float, cpu_seconds: float = math.inf) -> highspy.Highs:
        """HiGHS with this program, to be solved by the calling thread to a relative gap of `tolerance` within `seconds`, and so much of the
        thread's CPU time."""
        solver = highspy.Highs()
        # The rows are tight as they are: presolve took up to ten times as long as solving without it.
        options = {"output_flag": False, "presolve": "off", "threads": 1, "random_seed": 0, "mip_rel_gap": tolerance, "mip_abs_gap": 1e-6}
        for name, value in {**options, "time_limit": seconds}.items():
            solver.setOptionValue(name, value)
        last = time.thread_time() + cpu_seconds
        solver.cbMipInterrupt += lambda event: event.interrupt() if time.thread_time() > last else None
        passed = solver.passModel(self.linear_program())
        assert passed != highspy.HighsStatus.kError, passed  # a warning tells of coefficients too small to count
        return solver

    def binary_columns(self) -> np.ndarray:
        return np.arange(self.num_binary, dtype=np.int32)

    def is_integral(self, values: np.ndarray) -> bool:
        binary = values[: self.num_binary]
        return bool(np.all(np.abs(binary - np.round(binary)) < _INTEGRAL))

    def picks(self, values: np.ndarray) -> list[int]:
        """The candidate of each class with the largest x."""
        return [int(np.argmax(values[first:last])) for first, last in zip(self.offsets, self.offsets[1:], strict=False)]

    def columns_of(self, picks: Sequence[int]) -> np.ndarray:
        chosen = np.zeros(self.num_binary)
        chosen[np.array(self.offsets[:-1]) + np.array(picks)] = 1.0
        return chosen


class _Conversion:
    """Adds the columns and rows of one folded value to a model."""

    def __init__(self, model: IntegerProgram, evaluation: Evaluation, value: FoldedValue) -> None:
        self.model = model
        self.weight = model.scale * value.count
        problem, example = evaluation.problem, value.example
        self.price = lambda source, target: problem.price(example, source, target)
        producer = evaluation.nodes[value.producer].candidates
        self.given = _columns_by_state([c.results[value.result] for c in producer], model.offsets[value.producer])
        self.needed: list[dict[State, list[int]]] = []
        for number, slot in value.readers:
            states = [candidate.operands[slot] for candidate in evaluation.nodes[number].candidates]
            self.needed.append(_columns_by_state(states, model.offsets[number]))
        self.targets: list[State] = list(dict.fromkeys(state for needed in self.needed for state in needed))
        self.slices = problem.slices

    def add(self) -> None:
        if list(self.given) == self.targets and len(self.targets) == 1:
            return
        if len(self.needed) == 1:
            self._add_flows(self.needed[0], has_cost=True)
        else:
            self._add_shared()

    def _add_flows(self, needed: dict[State, list[int]], has_cost: bool) -> dict[tuple[State, State], int]:
        """A transport problem from what is given to what one reader needs: a column for each pair of states that has a way."""
        flows: dict[tuple[State, State], int] = {}
        for source in self.given:
            for target in needed:
                seconds = self.price(source, target)
                if seconds < math.inf:
                    flows[source, target] = self.model.column(self.weight * seconds if has_cost else 0.0)
        for state, columns in self.given.items():
            leaving = [(flow, 1.0) for (source, _), flow in flows.items() if source == state]
            self.model.row(0.0, 0.0, leaving + [(c, -1.0) for c in columns])
        for state, columns in needed.items():
            arriving = [(flow, 1.0) for (_, target), flow in flows.items() if target == state]
            self.model.row(0.0, 0.0, arriving + [(c, -1.0) for c in columns])
        return flows

    def _add_shared(self) -> None:
        readers = [self._add_flows(needed, has_cost=False) for needed in self.needed]
        hubs_of = {target: [hub for hub in self.targets if self.slices(hub, target)] for target in self.targets}
        hubs = {hub for found in hubs_of.values() for hub in found}
        brought: dict[tuple[State, State], int] = {}
        for pair in dict.fromkeys(pair for flows in readers for pair in flows):
            seconds = self.price(*pair)
            if pair[0] != pair[1] and (seconds > 0 or pair[1] in hubs):
                brought[pair] = self.model.column(self.weight * seconds)
        for (source, target), column in brought.items():
            using = [flows[source, target] for flows in readers if (source, target) in flows]
            if target in hubs:
                self.model.row(-math.inf, 0.0, [(column, 1.0)] + [(flow, -1.0) for flow in using])
            ways = [column] + [brought[source, hub] for hub in hubs_of[target] if (source, hub) in brought]
            for flow in using if self.price(source, target) > 0 else ():
                self.model.row(-math.inf, 0.0, [(flow, 1.0)] + [(way, -1.0) for way in ways])


def _columns_by_state(states: Sequence[State], offset: int) -> dict[State, list[int]]:
    found: dict[State, list[int]] = {}
    for position, state in enumerate(states):
        found.setdefault(state, []).append(offset + position)
    return found
