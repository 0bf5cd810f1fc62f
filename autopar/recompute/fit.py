"""The cheapest values to compute again so that a step fits into the memory budget.

    for each kind of layer     what to compute again at each price of memory (`min_cut`), and all of it
    for each of these          what a layer then keeps, what it needs while it is computed, what it takes: by writing the program, in which
                               layers of a kind take turns, and walking through it (`walk`)
    for each layer             one of these, at the least added time, so that at no layer there is more than the budget: an integer program

    held + what other stages of the rank keep + what earlier layers keep + what this one needs ≤ budget

What is chosen is walked through once more as a whole; where that comes to more, the budget is lowered by the difference and all is chosen
anew. The lower bound asks of all layers together no more than that what they keep fits, and lets each be cut in fractions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.ir.keys import STAGE
from autopar.ir.program import Program
from autopar.ir.units import in_bytes, in_seconds
from autopar.partition.solver.integer_program import IntegerProgram
from autopar.pipeline.order import live_microbatches
from autopar.pipeline.priced import price_pipeline
from autopar.pipeline.stage_work import Work
from autopar.recompute.again import computed_again
from autopar.recompute.choices import Groups, is_contraction, within
from autopar.recompute.decision import RecomputeDecision
from autopar.recompute.layer_values import Layer, layers_of
from autopar.recompute.min_cut import add_layer, cuts
from autopar.recompute.walk import REST, LayerMemory, StageMemory, walk

# Of the first integer program; of each that follows half as long as of the one before.
_SECONDS = 2.5
_TRIES = 4
_TYPICAL = 1e4
# HiGHS' word for it.
_FEASIBLE = 2
# Up to so many values each call is decided by itself as well; so many calls are walked through to price what layers may do.
_FEW_VALUES, _MOST_WALKED = 1500, 8000
# So close to the least is close enough: prices are not that exact.
_TOLERANCE = 1e-4

Names = frozenset[str]


@dataclass
class Fit:
    """What may be computed again of `program` by `groups` (layers, or all as one), within `budget` a rank."""

    program: Program
    cost: CostModel
    groups: Groups
    budget: MemoryBudget
    _walks: dict[Names, tuple[StageMemory, ...]] = field(default_factory=dict[Names, tuple[StageMemory, ...]])

    # ---- the whole

    @property
    def capacity_bytes(self) -> float:
        return self.budget.capacity_bytes

    def decide(self, already: Names = frozenset(), reason: str = "") -> RecomputeDecision:
        """`already` is what is computed again anyway, and for what `reason`: the user's regions."""
        at_first = self.peak_bytes(already)
        if at_first <= self.capacity_bytes or not self._layers:
            return RecomputeDecision(already, reason, at_first <= self.capacity_bytes, at_first)
        ways = [self._chosen, self._chosen_call_by_call] if self._num_values <= _FEW_VALUES else [self._chosen]
        found = [each for way in ways for each in self._tried(way, already)]
        fitting = [each for each in found if self.peak_bytes(each) <= self.capacity_bytes]
        if fitting:
            chosen = min(fitting, key=self.seconds)
            peak = self.peak_bytes(chosen)
            return RecomputeDecision(chosen, self._reason(chosen, at_first, peak), True, peak)
        chosen = min([already, *found], key=self.peak_bytes)
        peak = self.peak_bytes(chosen)
        wanted = f"{in_bytes(peak)} are the least that was found, of {in_bytes(at_first)}; the budget is {self._limit}"
        return RecomputeDecision(chosen, f"as little memory as computing layers again comes to: {wanted}", False, peak)

    def _tried(self, choose: Callable[[float, float], Names | None], already: Names) -> Iterator[Names]:
        """What `choose` comes to within the budget, lowered as long as that turns out to be more."""
        capacity = self.capacity_bytes
        for number in range(_TRIES):
            found = choose(capacity, _SECONDS / 2**number)
            if found is None:
                return
            yield found | already
            over = self.peak_bytes(found | already) - self.capacity_bytes
            if over <= 0:
                return
            capacity -= over

    def _reason(self, chosen: Names, before: float, after: float) -> str:
        seconds, bound = self.seconds(chosen), self.lower_bound_seconds()
        gap = f"{100 * (seconds / bound - 1):.1f} % above a bound" if bound > 0 else f"the bound is {in_seconds(bound)}"
        return (
            f"for the budget of {self._limit}: {in_bytes(after)} at most in place of {in_bytes(before)}, "
            f"{in_seconds(seconds)} more a step ({gap})"
        )

    @property
    def _limit(self) -> str:
        reserved = f" less {in_bytes(self.budget.reserved_bytes)} that are not counted here" if self.budget.reserved_bytes else ""
        return f"{in_bytes(self.budget.asked_bytes)}{reserved}"

    def peak_bytes(self, chosen: Names) -> float:
        """The most that a rank holds, parameters, gradients and optimizer state included."""
        return max(self._rank_peak(rank, self.walks(chosen)) for rank in range(self.program.order.num_ranks))

    def seconds(self, chosen: Names) -> float:
        """Of a step, on the rank that spends most on computing again."""
        ranks = [0.0] * self.program.order.num_ranks
        for stage, memory in enumerate(self.walks(chosen)):
            ranks[self.program.order.stages[stage]] += sum(each.seconds for each in memory.layers.values())
        return max(ranks) * self.program.mesh.num_microbatches

    def walks(self, chosen: Names) -> tuple[StageMemory, ...]:
        if chosen not in self._walks:
            work = Work(computed_again(self.program, chosen) if chosen else self.program)
            self._walks[chosen] = tuple(walk(work, self.cost, stage) for stage in range(self.program.order.num_stages))
        return self._walks[chosen]

    def _rank_peak(self, rank: int, memories: Sequence[StageMemory]) -> float:
        stages = self._stages_of(rank)
        kept = sum(self._live[stage] * memories[stage].kept_bytes for stage in stages)
        return self._held(rank) + max(kept - memories[stage].kept_bytes + memories[stage].peak_bytes for stage in stages)

    # ---- what there is to choose from

    @cached_property
    def _live(self) -> tuple[int, ...]:
        return live_microbatches(self.program.order)

    def _stages_of(self, rank: int) -> list[int]:
        return [stage for stage, home in enumerate(self.program.order.stages) if home == rank]

    def _held(self, rank: int) -> float:
        return sum(self._held_bytes[stage] for stage in self._stages_of(rank))

    @cached_property
    def _held_bytes(self) -> tuple[float, ...]:
        prices = price_pipeline(self.program, self.cost, self.program.order.num_stages)
        return tuple(each.held_bytes for each in prices.stages)

    @cached_property
    def _layers(self) -> list[Layer]:
        is_piped = self.program.order.num_stages > 1
        stages = {node: STAGE[node] if is_piped else 0 for node in self.groups if not is_piped or node in STAGE}
        groups = {node: name for node, name in self.groups.items() if node in stages}
        return list(layers_of(Work(self.program), self.cost, groups, stages, within(self.program, self.groups)))

    @cached_property
    def _kinds(self) -> dict[Layer, int]:
        """The layers in order, with a number that is equal for those of one kind: kinds are long, and are looked up by the thousand."""
        numbers: dict[Hashable, int] = {}
        return {layer: numbers.setdefault(layer.kind, len(numbers)) for layer in self._layers}

    @cached_property
    def _first(self) -> dict[int, Layer]:
        """By kind the first layer of it."""
        return {kind: layer for layer, kind in reversed(self._kinds.items())}

    @cached_property
    def _options(self) -> dict[int, list[Names]]:
        """By kind of layer what may be computed again of its first one, and, by the same places, of the others; see `_names`."""
        found: dict[int, list[Names]] = {}
        for layer in self._layers:
            if self._kinds[layer] not in found:
                all_cuts = [layer.names(each) for each in cuts(layer.values)]
                own = frozenset(node.name for node in layer.calls if node.name in layer.allowed)
                products = frozenset(node.name for node in layer.calls if is_contraction(node))
                found[self._kinds[layer]] = list(dict.fromkeys([*all_cuts, own - products, own]))
        return found

    @cached_property
    def _priced(self) -> list[list[tuple[Names, LayerMemory]]]:
        """By layer each option with what it comes to."""
        members: dict[int, list[Layer]] = defaultdict(list)
        for layer in self._layers:
            members[self._kinds[layer]].append(layer)
        memories: dict[tuple[int, int], LayerMemory] = {}
        turns = max(-(-len(self._options[kind]) // len(each)) for kind, each in members.items())
        turns = min(turns, max(1, _MOST_WALKED // self.program.num_nodes))
        for turn in range(turns):
            taken = [
                (layer, (turn * len(each) + number) % len(self._options[kind]))
                for kind, each in members.items()
                for number, layer in enumerate(each)
            ]
            chosen = frozenset[str]().union(*(self._names(layer, option) for layer, option in taken))
            walks = self.walks(chosen)
            for layer, option in taken:
                memories.setdefault((self._kinds[layer], option), walks[layer.stage].layers.get(layer.name, LayerMemory(0.0, 0.0, 0.0)))
        for kind, (layer, *_) in members.items():
            for option in range(len(self._options[kind])):
                if (kind, option) not in memories:
                    memories[kind, option] = self._estimated(layer, option, max(each.own_bytes for each in memories.values()))
        return [
            [(self._names(layer, option), memories[kind, option]) for option in range(len(self._options[kind]))]
            for layer, kind in self._kinds.items()
        ]

    def _estimated(self, layer: Layer, option: int, own_bytes: float) -> LayerMemory:
        """Of a layer that has had no turn: by the values of the minimum cut."""
        names = self._names(layer, option)
        again = {number for number, node in enumerate(layer.nodes) if node.name in names}
        read = {each for number in again for each in layer.values[number].reads} - again
        kept = {number for number, each in enumerate(layer.values) if each.is_wanted} - again | read
        sizes = [layer.values[number].bytes for number in kept if layer.values[number].bytes < math.inf]
        return LayerMemory(sum(sizes), own_bytes, sum(layer.values[number].seconds for number in again))

    def _names(self, layer: Layer, option: int) -> Names:
        """The calls of `layer` that stand where an option of its kind has calls of the first layer of that kind."""
        kind = self._kinds[layer]
        first = self._first[kind]
        names = self._options[kind][option]
        if first is layer:
            return names
        return frozenset(other.name for one, other in zip(first.calls, layer.calls, strict=True) if one.name in names)

    # ---- one option for each layer

    def _chosen(self, capacity: float, seconds: float) -> Names:
        """At the least time within `capacity`, as far as is known after so many `seconds`; where there is nothing, what keeps least."""
        found = self._solved(capacity, seconds)
        if found is None:
            found = [min(range(len(each)), key=lambda option, each=each: each[option][1].kept_bytes) for each in self._priced]
        return frozenset[str]().union(*(options[pick][0] for options, pick in zip(self._priced, found, strict=True)))

    def _solved(self, capacity: float, seconds: float) -> list[int] | None:
        priced, offsets = self._priced, [0]
        for options in priced:
            offsets.append(offsets[-1] + len(options))
        total = max(sum(max(memory.seconds for _, memory in options) for options in priced), 1e-12)
        model = IntegerProgram(_TYPICAL / total, offsets, offsets[-1])
        for options in priced:
            model.costs += [model.scale * memory.seconds for _, memory in options]
        for first, last in zip(offsets, offsets[1:], strict=False):
            model.row(1.0, 1.0, [(column, 1.0) for column in range(first, last)])
        rest = self.walks(frozenset())
        for rank in range(self.program.order.num_ranks):
            self._add_rank(model, rank, rest, capacity)
        solver = model.solver(_TOLERANCE, seconds)
        solver.run()
        values = np.asarray(solver.getSolution().col_value)
        if len(values) != offsets[-1] or not model.is_integral(values) or solver.getInfo().primal_solution_status != _FEASIBLE:
            return None
        return model.picks(values)

    def _add_rank(self, model: IntegerProgram, rank: int, rest: Sequence[StageMemory], capacity: float) -> None:
        stages = self._stages_of(rank)
        columns = dict(zip(range(len(self._layers)), model.offsets, strict=False))
        others: list[tuple[int, float]] = []
        fixed = self._held(rank)
        for stage in stages:
            fixed += self._live[stage] * rest[stage].layers[REST].kept_bytes
            for number, layer in enumerate(self._layers):
                if layer.stage == stage:
                    others += self._entries(number, columns[number], lambda memory, stage=stage: self._live[stage] * memory.kept_bytes)
        for stage in stages:
            # Where the rest is computed everything is kept; at a layer what it and the ones behind it keep is not, of one microbatch.
            self._add_row(model, others, capacity - fixed - rest[stage].layers[REST].own_bytes)
            mine = [number for number, layer in enumerate(self._layers) if layer.stage == stage]
            for place, number in enumerate(mine):
                behind = [
                    entry for later in mine[place:] for entry in self._entries(later, columns[later], lambda memory: -memory.kept_bytes)
                ]
                own = self._entries(number, columns[number], lambda memory: memory.own_bytes)
                self._add_row(model, [*others, *behind, *own], capacity - fixed)

    def _entries(self, number: int, first: int, size: Callable[[LayerMemory], float]) -> list[tuple[int, float]]:
        return [(first + option, size(memory)) for option, (_, memory) in enumerate(self._priced[number])]

    def _add_row(self, model: IntegerProgram, entries: Sequence[tuple[int, float]], room: float) -> None:
        model.row(-math.inf, room / self.capacity_bytes, [(column, entry / self.capacity_bytes) for column, entry in entries])

    # ---- how good that is

    def lower_bound_seconds(self) -> float:
        """Of a step: no choice that fits adds less on the rank that adds most. Equal layers count as one, which may be cut in fractions."""
        return max(self._bound(rank) for rank in range(self.program.order.num_ranks)) * self.program.mesh.num_microbatches

    def _bound(self, rank: int) -> float:
        first, counts = dict[int, Layer](), defaultdict[int, int](int)
        for layer in self._layers:
            if layer.stage in self._stages_of(rank):
                counts[self._kinds[layer]] += 1
                first.setdefault(self._kinds[layer], layer)
        model = IntegerProgram(1.0, [0], 0)
        self._add_layers(model, rank, [(layer, counts[kind]) for kind, layer in first.items()], self.capacity_bytes)
        solver = model.solver(0.0, _SECONDS)
        solver.run()
        is_solved = solver.getInfo().primal_solution_status == _FEASIBLE
        return float(solver.getInfo().objective_function_value) / _TYPICAL * self._typical if is_solved else 0.0

    def _chosen_call_by_call(self, capacity: float, seconds: float) -> Names | None:
        """Likewise with each call of each layer decided by itself, as in Checkmate (arXiv:1910.02653), and what layers need besides what
        they keep left out of account. None where nothing fits."""
        found = set[str]()
        for rank in range(self.program.order.num_ranks):
            layers = [(layer, 1) for layer in self._layers if layer.stage in self._stages_of(rank)]
            model = IntegerProgram(1.0, [0], 0)
            columns = self._add_layers(model, rank, layers, capacity)
            model.num_binary = len(model.costs)
            solver = model.solver(_TOLERANCE, seconds)
            solver.run()
            if solver.getInfo().primal_solution_status != _FEASIBLE:
                return None
            values = np.asarray(solver.getSolution().col_value)
            for (layer, _), pairs in zip(layers, columns, strict=True):
                found |= layer.names(frozenset(n for n, (again, _) in enumerate(pairs) if again is not None and values[again] > 0.5))
        return frozenset(found)

    def _add_layers(
        self, model: IntegerProgram, rank: int, layers: Sequence[tuple[Layer, int]], capacity: float
    ) -> list[list[tuple[int | None, int | None]]]:
        """Columns and rows of layers, each of which stands for so many, and that what all keep fits in where the backward begins."""
        stages, rest, memory = self._stages_of(rank), self.walks(frozenset()), list[tuple[int, float]]()
        found: list[list[tuple[int | None, int | None]]] = []
        for layer, count in layers:
            found.append(add_layer(model, layer.values, _TYPICAL / self._typical * count, lambda each: 0.0))
            for each, (_, kept) in zip(layer.values, found[-1], strict=True):
                if kept is not None:
                    memory.append((kept, count * self._live[layer.stage] * each.bytes))
        room = capacity - self._held(rank) - sum(self._live[stage] * rest[stage].layers[REST].kept_bytes for stage in stages)
        self._add_row(model, memory, room - max(rest[stage].layers[REST].own_bytes for stage in stages))
        return found

    @cached_property
    def _typical(self) -> float:
        """Seconds of computing all again."""
        return sum(each.seconds for layer in self._layers for each in layer.values if each.seconds < math.inf) or 1.0

    @cached_property
    def _num_values(self) -> int:
        return sum(len(layer.values) for layer in self._layers)
