"""Bound search on one folded problem: a lower bound rises and the best assignment known falls, until they meet or time is up.

ascend      the dual of the linear relaxation: a bound, and assignments near it     autopar.partition.solver.ascent
price       with a capacity: seconds per byte rise until an assignment fits
mix         equal layers decided one by one, as many as fit                         autopar.partition.solver.mixing
bound       candidates that no assignment as good as the best known can have go
solve       what remains, as an integer program                                     autopar.partition.solver.integer_program
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import highspy
import numpy as np

from autopar.partition.solver.ascent import Ascent
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.folding import Folded
from autopar.partition.solver.incumbents import Incumbent, Incumbents
from autopar.partition.solver.integer_program import IntegerProgram
from autopar.partition.solver.mixing import Mixture, mix
from autopar.partition.solver.tables import NO_WAY, Array, Tables

# Sweeps both ways between two looks at the incumbents.
_SWEEPS = 4
# Ascent stands still once a look gains less than this share of what is missing.
_PROGRESS = 0.02
# The same at a price of a byte that is only passed through.
_PROGRESS_IN_PASSING = 0.2
# Looks without any assignment, after which the integer program has its turn.
_MAX_LOOKS_IN_VAIN = 25
# What the integer program gets where the user set no limit, of this thread's CPU time: plans must not depend on what else the machine does;
# and of the clock, should that stand still.
_PATIENCE_SECONDS, _MOST_SECONDS = 5.0, 30.0
# Prices of a byte that are tried, and those of them that may bring nothing new.
_MAX_PRICES, _MAX_STALE = 40, 2
# Prices are good enough once none can raise the bound by more than this share of the tolerance; of the bound, where that is more.
_SHARE_OF_TOLERANCE, _SAME = 0.1, 1e-7
# The first price: so many steps for the whole capacity. It is doubled up to the highest, beyond which no price saves more
# bytes.
_FIRST_PRICE, _HIGHEST_PRICE = 0.25, 1e6
# The integer program is left alone where so many columns remain: it would not come far in its time.
_MAX_COLUMNS = 60_000


class BoundSearch:
    """A lower bound and incumbents of one folded problem: `picks` cost `upper` and fit, nothing that fits costs less than `lower`.

    `byte_price` is what a byte more of the capacity would save, in seconds; `seconds_per_byte` the price tried last.
    """

    def __init__(self, evaluation: Evaluation, deadline: float, tolerance: float) -> None:
        self.evaluation = evaluation
        self.tables = Tables.of(evaluation)
        self.deadline = deadline
        self.tolerance = tolerance
        self.picks: list[int] | None = None
        self.upper = math.inf
        self.lower = -math.inf
        self.seconds_per_byte = 0.0
        self.byte_price = 0.0
        self.num_bounded = 0
        self.mixture: Mixture | None = None
        self._incumbents = Incumbents()
        self.is_infeasible = self.tables.least_bytes > self.tables.capacity_bytes
        most_working = self.tables.capacity_bytes - (self.tables.least_bytes - self.tables.least_working_bytes)
        self._ascent = Ascent(self.tables, [each <= most_working for each in self.tables.working_bytes])

    def run(self) -> None:
        if self.is_infeasible:
            return
        if self._ascent.is_impossible:
            self.lower = NO_WAY
            return
        self._ascend()
        if not self._is_done() and self._is_capacity_binding():
            self._price_bytes()
            ends = self._incumbents.ends(self.byte_price)
            if ends is not None and not self._is_done():
                small, large = ends
                self.mixture = mix(self.evaluation, small.picks, large.picks)
        if not self._is_done():
            self._solve_rest()

    @property
    def seconds(self) -> float:
        """What the best assignment costs, all equal layers alike or not."""
        return min(self.upper, self.mixture.seconds) if self.mixture else self.upper

    def _is_done(self) -> bool:
        is_proved = self.seconds < math.inf and self.seconds - self.lower <= self.tolerance * self.seconds
        return is_proved or time.perf_counter() > self.deadline

    def _is_capacity_binding(self) -> bool:
        """Whether what costs least with bytes for nothing does not fit."""
        known = self._incumbents.known
        return bool(known) and not min(known, key=lambda incumbent: incumbent.seconds).fits

    def _ascend(self) -> None:
        """Raise the bound at this price of a byte until it meets an incumbent or stands still."""
        before = -math.inf
        for look in itertools.count():
            for _ in range(_SWEEPS):
                self._ascent.sweep(True)
                self._ascent.sweep(False)
            bound = self._ascent.bound() - self.seconds_per_byte * self._spare_bytes()
            self._raise(bound)
            self._consider(self._ascent.assignment())
            missing = self._incumbents.cheapest(self.seconds_per_byte) - bound
            progress = _PROGRESS_IN_PASSING if self._is_capacity_binding() else _PROGRESS
            if missing <= self.tolerance * abs(bound) or bound - before <= progress * missing < math.inf or self._is_done():
                return
            if before == bound or (missing == math.inf and look >= _MAX_LOOKS_IN_VAIN):
                return
            before = bound

    def _raise(self, bound: float) -> None:
        """A better bound, and the price of a byte that it was found at."""
        if bound > self.lower:
            self.lower, self.byte_price = bound, self.seconds_per_byte

    def _spare_bytes(self) -> float:
        """What is left for held bytes; 0 without a capacity, whose price is 0 then."""
        capacity = self.tables.capacity_bytes
        return capacity - self.tables.least_working_bytes if capacity < math.inf else 0.0

    def _consider(self, picks: list[int]) -> None:
        """Keep `picks`, by themselves if they are the best that fits."""
        seconds = self.evaluation.seconds(picks)
        fits = self.tables.num_bytes(picks) <= self.tables.capacity_bytes
        if seconds < self.upper and fits:
            self.picks, self.upper = picks, seconds
        self._incumbents.add(Incumbent(tuple(picks), seconds, self.tables.held(picks) - self._spare_bytes(), fits))

    def _price_bytes(self) -> None:
        """Find the price of a byte with the best bound: there an incumbent that fits costs no more than one that does not.

        Where none is cheaper there than these two, none is left between them, and a mixture takes a part of each.
        """
        num_stale, step = 0, self.lower / self.tables.capacity_bytes
        next_price = _FIRST_PRICE * step
        for _ in range(_MAX_PRICES):
            if self._incumbents.has_fitting:
                next_price = self._incumbents.best_price()
            reachable, lower = self._incumbents.cheapest(next_price), self.lower
            enough = max(self.tolerance * _SHARE_OF_TOLERANCE, _SAME) * abs(reachable)
            if self._incumbents.has_fitting and reachable - self.lower <= enough:
                return
            self._set_price(next_price)
            self._ascend()
            is_new = self._incumbents.cheapest(next_price) < reachable - enough or self.lower > lower + enough
            num_stale = 0 if is_new else num_stale + 1
            if self._is_done() or num_stale > _MAX_STALE or next_price > _HIGHEST_PRICE * step:
                return
            next_price *= 2

    def _set_price(self, seconds_per_byte: float) -> None:
        added = seconds_per_byte - self.seconds_per_byte
        self._ascent.add([added * each for each in self.tables.held_bytes])
        self.seconds_per_byte = seconds_per_byte

    def _solve_rest(self) -> None:
        """Leave out what no better assignment can have, and solve the rest exactly, as far as time allows."""
        if self.picks is not None and self.mixture is None:
            self._consider(self.evaluation.descend(self.picks))
        remaining = self._remaining()
        self.num_bounded = sum(int((~each).sum()) for each in remaining)
        evaluation = _restricted(self.evaluation, remaining)
        if _num_pairs(evaluation) > _MAX_COLUMNS:
            return
        program = IntegerProgram.of(evaluation)
        is_limited = self.deadline < math.inf
        seconds = max(0.01, self.deadline - time.perf_counter()) if is_limited else _MOST_SECONDS
        solver = program.solver(self.tolerance, seconds, math.inf if is_limited else _PATIENCE_SECONDS)
        positions = [np.flatnonzero(each) for each in remaining]
        if self.picks is not None:
            start = [int(np.searchsorted(each, pick)) for each, pick in zip(positions, self.picks, strict=True)]
            solver.setSolution(program.num_binary, program.binary_columns(), program.columns_of(start))
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            self.is_infeasible = self.picks is None and self.tables.capacity_bytes < math.inf
            self.lower = self.upper if self.picks is not None else NO_WAY
            return
        values = np.asarray(solver.getSolution().col_value)
        if len(values) and program.is_integral(values):
            self._consider([int(each[pick]) for each, pick in zip(positions, program.picks(values), strict=True)])
        if self.mixture is not None and len(self.evaluation.nodes) < len(self.evaluation.problem.nodes):
            return  # a mixture decides equal layers apart: the bound of a program in which they are one is none of it
        bound = solver.getInfo().mip_dual_bound / program.scale
        if math.isfinite(bound):
            self.lower = max(self.lower, min(bound, self.upper))

    def _remaining(self) -> list[Array]:
        """By class, the candidates that an assignment cheaper than the best known may have."""
        numbers = range(len(self.tables.seconds))
        remaining = [np.ones(len(each), dtype=bool) for each in self.tables.seconds]
        if self.picks is None:
            return remaining
        bound = self._ascent.bound() - self.seconds_per_byte * self._spare_bytes()
        for number in numbers:
            positions = self._ascent.positions[number]
            dearer = self._ascent.collect(number)  # which only raises the bound
            remaining[number][:] = False
            remaining[number][positions] = bound + dearer <= self.seconds * (1 + 1e-9)
            remaining[number][self.picks[number]] = True
            self._ascent.hand_on(number, True)
        return remaining


def _restricted(evaluation: Evaluation, remaining: list[Array]) -> Evaluation:
    """The same problem with fewer candidates, each class alike."""
    positions = [np.flatnonzero(each).tolist() for each in remaining]
    folded: Folded = evaluation.folded
    nodes = evaluation.problem.nodes
    kept = [tuple(nodes[member].candidates[pick] for pick in positions[number]) for number, member in enumerate(folded.members)]
    restricted = tuple(replace(node, candidates=kept[number]) for node, number in zip(nodes, folded.class_of, strict=True))
    return Evaluation(replace(evaluation.problem, nodes=restricted), folded)


def _num_pairs(evaluation: Evaluation) -> int:
    """The columns that conversions take in an integer program."""
    total = 0
    for value in evaluation.folded.values:
        given = {candidate.results[value.result] for candidate in evaluation.nodes[value.producer].candidates}
        for number, slot in value.readers:
            total += len(given) * len({candidate.operands[slot] for candidate in evaluation.nodes[number].candidates})
    return total
