"""The cheapest values to compute again so that a step fits into the memory budget.

    for each kind of segment   the sets of values of which none is better than another in time, in what is kept and in what is needed
                               (`options`), by what the segment would then do (`timeline`)
    for each segment           one of these, at the least added time, so that at none there is more than the budget: an integer program

    held + what other stages of the rank keep + gradients of later segments + what earlier ones keep + what this one needs ≤ budget

A segment is a layer, or what stands before, between or behind layers (`segments`): the head and the loss are decided about as a layer is.
What is chosen is written and walked through as a whole (`walk`); where that comes to more, what was found of its segments takes the place
of what was thought, and all is chosen anew. The lower bound asks of all segments together no more than that what they keep fits, and lets
each be cut in fractions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from autopar.recompute.choices import Groups, within
from autopar.recompute.decision import RecomputeDecision
from autopar.recompute.inside import InsideBytes
from autopar.recompute.layer_values import Layer, layers_of
from autopar.recompute.min_cut import add_layer
from autopar.recompute.options import options_of
from autopar.recompute.walk import LayerMemory, StageMemory, trace, walk

# Of the first integer program; of each that follows half as long as of the one before.
_SECONDS = 2.5
_TRIES = 4
_TYPICAL = 1e4
# HiGHS' word for it.
_FEASIBLE = 2
# Options of all segments together, and of each at the least.
_MOST_OPTIONS, _FEWEST_OPTIONS = 1500, 24
# So close to the least is close enough: prices are not that exact.
_TOLERANCE = 1e-4

Names = frozenset[str]


@dataclass
class Fit:
    """What may be computed again of `program` by `groups` (segments, or all as one), within `budget` a rank."""

    program: Program
    cost: CostModel
    groups: Groups
    budget: MemoryBudget
    _walks: dict[Names, tuple[StageMemory, ...]] = field(default_factory=dict[Names, tuple[StageMemory, ...]])
    # What was found of an option, by kind and number, and how much more the options of a kind came to than was thought.
    _found: dict[tuple[int, int], LayerMemory] = field(default_factory=dict[tuple[int, int], LayerMemory])
    _more: dict[int, LayerMemory] = field(default_factory=dict[int, LayerMemory])

    def __post_init__(self) -> None:
        self._inside = InsideBytes(self.cost)

    # ---- the whole

    @property
    def capacity_bytes(self) -> float:
        return self.budget.capacity_bytes

    def decide(self, already: Names = frozenset(), reason: str = "") -> RecomputeDecision:
        """`already` is what is computed again anyway, and for what `reason`: the user's regions."""
        at_first = self.peak_bytes(already)
        if at_first <= self.capacity_bytes or not self._layers:
            return RecomputeDecision(already, reason, at_first <= self.capacity_bytes, at_first)
        found = list(self._tried(already))
        if all(self.peak_bytes(each) > self.capacity_bytes for each in found):
            found.append(within(self.program, self.groups) | already)
        fitting = [each for each in found if self.peak_bytes(each) <= self.capacity_bytes]
        if fitting:
            chosen = min(fitting, key=self.seconds)
            peak = self.peak_bytes(chosen)
            return RecomputeDecision(chosen, self._reason(chosen, at_first, peak), True, peak)
        chosen = min([already, *found], key=self.peak_bytes)
        peak = self.peak_bytes(chosen)
        wanted = f"{in_bytes(peak)} are the least that was found, of {in_bytes(at_first)}; the budget is {self._limit}"
        return RecomputeDecision(chosen, f"as little memory as computing layers again comes to: {wanted}", False, peak)

    def _tried(self, already: Names) -> Iterator[Names]:
        """What is chosen within the budget, anew as long as that turns out to be more; where nothing is, what takes least."""
        capacity = self.capacity_bytes
        for number in range(_TRIES):
            seconds = _SECONDS / 2**number
            picks, is_least = self._solved(capacity, seconds), False
            if picks is None:
                picks, is_least = self._least(seconds), True
            if picks is None:
                return
            yield (chosen := self._chosen(picks) | already)
            over = self.peak_bytes(chosen) - self.capacity_bytes
            if over <= 0:
                return
            if not self._learn(chosen, picks):
                if is_least:
                    return
                capacity -= over

    def _chosen(self, picks: Sequence[int]) -> Names:
        return frozenset[str]().union(*(self._names(layer, pick) for layer, pick in zip(self._layers, picks, strict=True)))

    def _least(self, seconds: float) -> list[int] | None:
        """At the least peak, as far as that is known, the least time: the program may take less than is thought."""
        picks = self._solved(None, seconds)
        return picks and (self._solved((1 + _TOLERANCE) * self._thought_peak(picks), seconds) or picks)

    def _thought_peak(self, picks: Sequence[int]) -> float:
        """The largest of what the rows of the integer program add up."""
        memories = [self._memory(self._kinds[layer], pick) for layer, pick in zip(self._layers, picks, strict=True)]
        peak = 0.0
        for rank in range(self.program.order.num_ranks):
            stages = self._stages_of(rank)
            mine = [(layer, memory) for layer, memory in zip(self._layers, memories, strict=True) if layer.stage in stages]
            kept = sum(self._live[layer.stage] * memory.kept_bytes for layer, memory in mine)
            fixed = self._held(rank) + self._undecided(rank)
            for stage in stages:
                here = kept
                for layer, memory in reversed([each for each in mine if each[0].stage == stage]):
                    here -= memory.kept_bytes
                    peak = max(peak, fixed + here + memory.own_bytes + self._unchanged(layer).gradients_bytes)
        return peak

    def _learn(self, chosen: Names, picks: Sequence[int]) -> bool:
        """What `picks` come to in the program as it is written with them; whether that was not known."""
        walks, is_new = self.walks(chosen), False
        for layer, pick in zip(self._layers, picks, strict=True):
            kind = self._kinds[layer]
            found = walks[layer.stage].layers.get(layer.name, LayerMemory())
            thought = self._found.get((kind, pick)) or self._options[kind][pick][1]
            largest = _largest(found, thought) if (kind, pick) in self._found else found
            if largest.kept_bytes > thought.kept_bytes or largest.own_bytes > thought.own_bytes or (kind, pick) not in self._found:
                is_new = is_new or largest.kept_bytes > thought.kept_bytes or largest.own_bytes > thought.own_bytes
                self._found[kind, pick] = largest
                first = self._options[kind][pick][1]
                more = LayerMemory(max(largest.kept_bytes - first.kept_bytes, 0.0), max(largest.own_bytes - first.own_bytes, 0.0))
                self._more[kind] = _largest(self._more.get(kind, LayerMemory()), more)
        return is_new

    def _memory(self, kind: int, option: int) -> LayerMemory:
        """What is known of an option: found, or thought, with what others of its kind came to besides."""
        if (kind, option) in self._found:
            return self._found[kind, option]
        thought, more = self._options[kind][option][1], self._more.get(kind)
        if more is None or option == 0:
            return thought
        return replace(thought, kept_bytes=thought.kept_bytes + more.kept_bytes, own_bytes=thought.own_bytes + more.own_bytes)

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
            self._walks[chosen] = tuple(walk(work, self.cost, stage, self._inside) for stage in range(self.program.order.num_stages))
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
        """Gradients are left out that count from where they are made."""
        first = self.walks(frozenset())
        return sum(self._held_bytes[stage] - first[stage].gradients_bytes for stage in self._stages_of(rank))

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
        """The layers in order, with a number that is equal for those of one kind that need the same where all is kept: the last one may
        have other gradients beside it. Kinds are long, and are looked up by the thousand."""
        numbers: dict[Hashable, int] = {}
        unchanged = {layer: self._unchanged(layer) for layer in self._layers}
        kinds = {layer: (layer.kind, each.kept_bytes, each.own_bytes) for layer, each in unchanged.items()}
        return {layer: numbers.setdefault(kind, len(numbers)) for layer, kind in kinds.items()}

    @cached_property
    def _first(self) -> dict[int, Layer]:
        """By kind the first layer of it."""
        return {kind: layer for layer, kind in reversed(self._kinds.items())}

    @cached_property
    def _options(self) -> dict[int, list[tuple[Names, LayerMemory]]]:
        """By kind of layer what may be computed again of its first one, and, by the same places, of the others; see `_names`."""
        work = Work(self.program)
        known = {stage: trace(work, self.cost, stage, self._inside) for stage in {layer.stage for layer in self._layers}}
        most = max(_FEWEST_OPTIONS, _MOST_OPTIONS // len(self._layers))
        found: dict[int, list[tuple[Names, LayerMemory]]] = {}
        for kind, layer in self._first.items():
            if layer.name in known[layer.stage].segments:
                options = options_of(layer.timeline(known[layer.stage]), most)
                found[kind] = [(layer.names(again), memory) for again, memory in options]
            else:
                found[kind] = [(frozenset(), LayerMemory())]
        return found

    def _names(self, layer: Layer, option: int) -> Names:
        """The calls of `layer` that stand where an option of its kind has calls of the first layer of that kind."""
        kind = self._kinds[layer]
        first = self._first[kind]
        names, _ = self._options[kind][option]
        if first is layer:
            return names
        return frozenset(other.name for one, other in zip(first.calls, layer.calls, strict=True) if one.name in names)

    # ---- one option for each layer

    def _solved(self, capacity: float | None, seconds: float) -> list[int] | None:
        """At the least time within `capacity`, or of the least peak where that is None, as far as is known after so many `seconds`."""
        offsets, priced = [0], list[list[LayerMemory]]()
        for layer in self._layers:
            kind = self._kinds[layer]
            priced.append([self._memory(kind, option) for option in range(len(self._options[kind]))])
            offsets.append(offsets[-1] + len(priced[-1]))
        total = max(sum(max(memory.seconds for memory in options) for options in priced), 1e-12)
        model = IntegerProgram(_TYPICAL / total, offsets, offsets[-1])
        for options in priced:
            model.costs += [model.scale * memory.seconds * (1.0 if capacity is not None else 1e-3) for memory in options]
        for first, last in zip(offsets, offsets[1:], strict=False):
            model.row(1.0, 1.0, [(column, 1.0) for column in range(first, last)])
        # The peak, in terms of what is there where all is kept.
        peak = None if capacity is not None else (model.column(_TYPICAL), self.peak_bytes(frozenset()))
        for rank in range(self.program.order.num_ranks):
            self._add_rank(model, rank, priced, capacity or 0.0, peak)
        solver = model.solver(_TOLERANCE, seconds)
        solver.run()
        values = np.asarray(solver.getSolution().col_value)
        if len(values) < offsets[-1] or not model.is_integral(values) or solver.getInfo().primal_solution_status != _FEASIBLE:
            return None
        return model.picks(values)

    def _add_rank(
        self, model: IntegerProgram, rank: int, priced: list[list[LayerMemory]], capacity: float, peak: tuple[int, float] | None
    ) -> None:
        """That no segment's memory is above `capacity`, or above the `peak` that a column stands for."""

        def entries(number: int, size: Callable[[LayerMemory], float]) -> list[tuple[int, float]]:
            return [(model.offsets[number] + option, size(memory)) for option, memory in enumerate(priced[number])]

        stages, above = self._stages_of(rank), [] if peak is None else [(peak[0], -peak[1])]
        mine = {stage: [number for number, layer in enumerate(self._layers) if layer.stage == stage] for stage in stages}
        others = [
            entry
            for stage in stages
            for number in mine[stage]
            for entry in entries(number, lambda memory, stage=stage: self._live[stage] * memory.kept_bytes)
        ]
        fixed = self._held(rank) + self._undecided(rank)
        for stage in stages:
            # At a segment what it and the ones behind it keep is not there, of one microbatch.
            for place, number in enumerate(mine[stage]):
                behind = [entry for later in mine[stage][place:] for entry in entries(later, lambda memory: -memory.kept_bytes)]
                own = entries(number, lambda memory: memory.own_bytes)
                gradients = self._unchanged(self._layers[number]).gradients_bytes
                self._add_row(model, [*others, *behind, *own, *above], capacity - fixed - gradients)

    def _undecided(self, rank: int) -> float:
        """What segments keep of which nothing may be computed again: what stages share."""
        decided = {(layer.stage, layer.name) for layer in self._layers}
        return sum(
            self._live[stage] * memory.kept_bytes
            for stage in self._stages_of(rank)
            for name, memory in self.walks(frozenset())[stage].layers.items()
            if (stage, name) not in decided
        )

    def _unchanged(self, layer: Layer) -> LayerMemory:
        """What a layer comes to where all is kept."""
        return self.walks(frozenset())[layer.stage].layers.get(layer.name, LayerMemory())

    def _add_row(self, model: IntegerProgram, entries: Sequence[tuple[int, float]], room: float) -> None:
        model.row(-math.inf, room / self.capacity_bytes, [(column, entry / self.capacity_bytes) for column, entry in entries])

    # ---- how good that is

    def lower_bound_seconds(self) -> float:
        """Of a step: no choice that fits adds less on the rank that adds most. Equal layers count as one, which may be cut in fractions."""
        return max(self._bound(rank) for rank in range(self.program.order.num_ranks)) * self.program.mesh.num_microbatches

    def _bound(self, rank: int) -> float:
        """All that segments keep fits in where the backward of a stage begins, beside what that makes, but for the last one's own."""
        counts, first, last = defaultdict[int, int](int), dict[int, Layer](), dict[int, Layer]()
        for layer in self._layers:
            if layer.stage in self._stages_of(rank):
                counts[self._kinds[layer]] += 1
                first.setdefault(self._kinds[layer], layer)
                last[layer.stage] = layer
        model = IntegerProgram(1.0, [0], 0)
        kept_columns: dict[int, list[tuple[int, float]]] = {}
        typical = sum(each.seconds for layer in self._layers for each in layer.values if each.seconds < math.inf) or 1.0
        for kind, layer in first.items():
            columns = add_layer(model, layer.values, _TYPICAL / typical * counts[kind], lambda each: 0.0)
            kept_columns[kind] = [(kept, each.bytes) for each, (_, kept) in zip(layer.values, columns, strict=True) if kept is not None]
        room = self.capacity_bytes - self._held(rank) - self._undecided(rank)
        total = [
            (column, counts[kind] * self._live[layer.stage] * size) for kind, layer in first.items() for column, size in kept_columns[kind]
        ]
        for stage, layer in last.items():
            walked = self.walks(frozenset())[stage]
            is_last = [*walked.layers][-1:] == [layer.name]
            gone = [(column, -size) for column, size in kept_columns[self._kinds[layer]]] if is_last else []
            self._add_row(model, [*total, *gone], room - (walked.turn_bytes if is_last else 0.0))
        solver = model.solver(0.0, _SECONDS)
        solver.run()
        is_solved = solver.getInfo().primal_solution_status == _FEASIBLE
        return float(solver.getInfo().objective_function_value) / _TYPICAL * typical if is_solved else 0.0


def _largest(one: LayerMemory, other: LayerMemory) -> LayerMemory:
    return replace(one, kept_bytes=max(one.kept_bytes, other.kept_bytes), own_bytes=max(one.own_bytes, other.own_bytes))
