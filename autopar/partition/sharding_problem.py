"""From a GLOBAL program to an assignment problem: nodes are ops, inputs and results; candidates strategies; states shardings.

A parameter reads its own gradient, so that both take one sharding; a tangent reads the output it belongs to, a buffer
its new value. The loss and the other results are readers that want them whole. A `getitem` is no node: it names a result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel, is_view
from autopar.cost.reshard_prices import ReshardPrices
from autopar.graph.gradient_sums import sums_in_other_dtypes
from autopar.graph.microbatches import is_summed_later, known_ahead, summed_later
from autopar.ir.freedom import Freedom
from autopar.ir.keys import BATCH, DIMS, DROPPED, PHASE, REPEATABLE
from autopar.ir.markers import MARKERS, held, save
from autopar.ir.mesh import Mesh, parent
from autopar.ir.program import Input, Output, Program, operands, results_of
from autopar.ir.reshard import is_slice
from autopar.ir.sharding import Dims, Sharding, Strategy
from autopar.ops.strategies import operand_dims, placeholder_strategies, shared_atoms, signature_of, strategies_of
from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem, State, ValueIndex
from autopar.partition.zero_placements import has_copy, in_parts, is_in_parts, kept_whole, of_copies

# The result that is read by the input of this kind and name: where it must be left.
HOMES = {"gradient": "parameter", "buffer": "buffer", "output": "tangent"}
_NO_LIMIT = MemoryBudget()
# More than any plan saves by it. A sum that passes through a cast in parts never needs it, nor does a copy of a parameter.
_UNWANTED_SECONDS = 1.0


class PriceClass(NamedTuple):
    """What it costs to move a value depends on nothing else: its bytes, whether it is known ahead of the microbatches, whether it is a
    gradient that they sum, whether ranks should not sum it in its dtype, and whether it is read for a copy that is made once a step."""

    num_bytes: float
    is_ahead: bool
    is_result: bool
    is_unwanted: bool
    is_once: bool


@dataclass
class ShardingProblem:
    """`problem` with what its nodes stand for: `strategies[i]` of node i, `index[name]` of a graph node."""

    problem: Problem
    index: dict[str, int]
    strategies: list[tuple[Strategy, ...]]

    @staticmethod
    def of(program: Program, cost: CostModel, pinned: Mapping[str, Strategy], budget: MemoryBudget = _NO_LIMIT) -> ShardingProblem:
        """The problem of `program`, which has DIMS and BATCH. The nodes named in `pinned` have that strategy alone."""
        builder = _Builder(program, cost, pinned, budget)
        builder.build()
        prices = builder.prices()
        problem = Problem(tuple(builder.nodes), prices.price, _slices, prices.price_class, budget.capacity_bytes)
        return ShardingProblem(problem, builder.index, builder.strategies)


def _slices(state: State, other: State) -> bool:
    assert isinstance(state, Sharding) and isinstance(other, Sharding)
    return is_slice(state, other)


def whole_axes(
    strategies: tuple[Strategy, ...], operand_dims: Sequence[Dims], result_dims: Sequence[Dims], mesh: Mesh
) -> tuple[Strategy, ...]:
    """The strategies that use the sub-axes of an axis (tp.0, tp.1) as one, or apart where an atom is too small for the whole.

    Every sub-axis multiplies the strategies of an op, but apart they serve one purpose: two key heads on four ranks.
    Then the major one is on the first such atom of its dim, and the others do what they like.
    """
    # Those of dp have roles of their own.
    families = [mesh.parts(axis) for axis in dict.fromkeys(map(parent, mesh.names)) if len(mesh.parts(axis)) > 1 and axis != "dp"]
    dims = (*operand_dims, *result_dims)
    return tuple(each for each in strategies if all(_together(each, family, dims, mesh) for family in families))


def _together(strategy: Strategy, family: tuple[str, ...], dims: Sequence[Dims], mesh: Mesh) -> bool:
    shardings = strategy.operands + strategy.results
    if len({tuple(_place(sharding, axis) for sharding in shardings) for axis in family}) == 1:
        return True
    places = [_place(sharding, family[0]) for sharding in shardings]
    found = [place in _too_small(each, mesh.size_of(family)) for each, place in zip(dims, places, strict=True) if isinstance(place, int)]
    return bool(found) and all(found)


def _too_small(dims: Dims, size: int) -> set[int]:
    """For each dim the position of its first atom that `size` ranks cannot split."""
    found: set[int] = set()
    start = 0
    for dim in dims:
        first = next((index for index, atom in enumerate(dim) if atom % size), None)
        if first is not None:
            found.add(start + first)
        start += len(dim)
    return found


def _place(sharding: Sharding, axis: str) -> object:
    """What `axis` does to a value: the atom that it splits, how it leaves it unreduced, or nothing."""
    return next((position for position, axes in enumerate(sharding.splits) if axis in axes), dict(sharding.unreduced).get(axis))


@dataclass(frozen=True)
class _Prices:
    """What it costs to move each value that is `moved`. Kept as long as the plan is, for what else could have been done."""

    moved: Mapping[ValueIndex, PriceClass]
    reshards: ReshardPrices
    freedom: Freedom
    num_microbatches: int

    def price_class(self, value: ValueIndex) -> PriceClass:
        return self.moved[value]

    def price(self, value: ValueIndex, source: State, target: State) -> float:
        assert isinstance(source, Sharding) and isinstance(target, Sharding)
        moved = self.moved[value]
        seconds = self.reshards.seconds(moved.num_bytes, source, target, moved.is_ahead)
        if moved.is_unwanted and set(source.unreduced) - set(target.unreduced):
            seconds += _UNWANTED_SECONDS
        if moved.is_once and self.freedom.zero is None and self._beside_batch(source) != self._beside_batch(target):
            seconds += _UNWANTED_SECONDS  # a copy is whole over dp, or in parts; over other axes it lies as the parameter does
        # A gradient is moved when it is summed, once for all microbatches, unless it is cut after each; seconds are those of one.
        is_cut = self.freedom.cuts_each_microbatch and any(map(self.freedom.is_batch, target.split_axes))
        is_shared = moved.is_result and is_summed_later(source) and is_summed_later(target) and not is_cut
        return seconds / self.num_microbatches if is_shared or moved.is_once else seconds

    def _beside_batch(self, sharding: Sharding) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(axis for axis in split if not self.freedom.is_batch(axis)) for split in sharding.splits)


@dataclass
class _Builder:
    program: Program
    cost: CostModel
    pinned: Mapping[str, Strategy]
    budget: MemoryBudget
    nodes: list[AssignmentNode] = field(default_factory=list[AssignmentNode])
    index: dict[str, int] = field(default_factory=dict[str, int])
    strategies: list[tuple[Strategy, ...]] = field(default_factory=list[tuple[Strategy, ...]])
    _of_index: list[Node] = field(default_factory=list[Node])
    _results: frozenset[Node] = frozenset()
    _ahead: frozenset[Node] = frozenset()
    _unwanted: frozenset[Node] = frozenset()
    _kept_whole: frozenset[Node] = frozenset()
    _inputs: dict[tuple[int, tuple[Strategy, ...]], tuple[Candidate, ...]] = field(default_factory=dict)
    _kinds: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    _priced: dict[int, tuple[tuple[Strategy, ...], tuple[Candidate, ...]]] = field(default_factory=dict)

    def build(self) -> None:
        calls = [node for node in self.program.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
        self._of_index = [*self.program.placeholders, *calls]
        if self.program.mesh.num_microbatches > 1:
            self._ahead = known_ahead(self.program)
            self._results = frozenset(node for output, node in self.program.named_outputs() if output.kind == "gradient")
        self._unwanted = sums_in_other_dtypes(self.program)
        self._kept_whole = kept_whole(self.program)
        self.index = {node.name: number for number, node in enumerate(self._of_index)}
        homes: dict[tuple[str | None, str], Node] = {(item.kind, item.name): node for item, node in self.program.named_inputs()}
        left: dict[Node, Node] = {}
        for output, node in self.program.named_outputs():
            home = homes.get((HOMES.get(output.kind), output.name))
            if home is not None:
                left[home] = node
        for item, node in self.program.named_inputs():
            self._add_input(item, node, left.get(node))
        for node in calls:
            self._add_call(node)
        for output, node in self.program.named_outputs():
            if (HOMES.get(output.kind), output.name) not in homes:
                self._add_result(output, node)

    def value_of(self, node: Node) -> ValueIndex:
        if node.target is operator.getitem:
            producer, result = node.args
            assert isinstance(producer, Node) and isinstance(result, int)
            return self.index[producer.name], result
        return self.index[node.name], 0

    def prices(self) -> _Prices:
        """What it costs to move the values of the program; they do not hold its graph."""
        moved = {
            (number, result): self._price_class(node, tensor)
            for number, node in enumerate(self._of_index)
            for result, tensor in enumerate(results_of(node))
            if tensor is not None
        }
        return _Prices(moved, ReshardPrices(self.cost), self.program.freedom, self.program.mesh.num_microbatches)

    def _price_class(self, node: Node, tensor: Tensor) -> PriceClass:
        num_bytes = float(tensor.numel() * tensor.dtype.itemsize)
        is_once = bool(node.users) and all(user.target is held for user in node.users)
        return PriceClass(num_bytes, node in self._ahead, node in self._results, node in self._unwanted, is_once)

    def _add_input(self, item: Input, node: Node, left: Node | None) -> None:
        """`left` is the result that must be left where this input lies."""
        dims = DIMS[node][0]
        strategies = (self.pinned[node.name],) if node.name in self.pinned else self._placements(item, node)
        reads = () if left is None else (self.value_of(left),)
        kind = self._number(("input", item.kind, dims, item.dtype, item.requires_grad, len(reads), has_copy(node)))
        if (kind, strategies) not in self._inputs:
            candidates = tuple(self._input_candidate(item, dims, strategy, len(reads), has_copy(node)) for strategy in strategies)
            self._inputs[kind, strategies] = candidates
        candidates = self._inputs[kind, strategies]
        if reads and item.kind != "buffer":
            strategies, candidates = self._or_summed_later(strategies, candidates)
        phase = "backward" if item.kind == "parameter" else "forward"
        self.nodes.append(AssignmentNode(node.name, reads, candidates, kind, phase=phase))
        self.strategies.append(strategies)

    def _placements(self, item: Input, node: Node) -> tuple[Strategy, ...]:
        dims, mesh, freedom = DIMS[node][0], self.program.mesh, self.program.freedom
        if freedom.zero is not None and item.kind == "parameter":
            freedom = replace(freedom, shards_parameters=False)
        strategies = whole_axes(placeholder_strategies(item.kind, dims, mesh, BATCH[node][0], freedom), (), (dims,), mesh)
        if not is_in_parts(item, self.program.freedom):
            return strategies
        return in_parts(strategies, dims, mesh, self.program.freedom.master_axes(mesh)) or strategies

    def _or_summed_later(
        self, strategies: tuple[Strategy, ...], candidates: tuple[Candidate, ...]
    ) -> tuple[tuple[Strategy, ...], tuple[Candidate, ...]]:
        """Those and, over several microbatches, the same with what is read still to be summed over them."""
        if self.program.mesh.num_microbatches == 1:
            return strategies, candidates
        later = tuple(replace(each, operands=tuple(map(summed_later, each.operands))) for each in candidates)  # type: ignore[arg-type]
        return strategies * 2, candidates + later

    def _input_candidate(self, item: Input, dims: Dims, strategy: Strategy, num_reads: int, has_copy: bool) -> Candidate:
        """A parameter that lies whole is its own copy, and the copy counts it."""
        sharding = strategy.results[0]
        seconds = self.cost.parameter(dims, item.dtype, sharding, item.requires_grad).seconds if item.kind == "parameter" else 0.0
        held = self.budget.optimizer.held_bytes(item, self.cost.local_bytes(dims, item.dtype, sharding))
        if has_copy and not self._is_over_batch(sharding):
            held -= self.cost.local_bytes(dims, item.dtype, sharding)
        # What there is to do once a step is shared by all microbatches.
        return Candidate((sharding,) * num_reads, (sharding,), seconds / self.program.mesh.num_microbatches, held)

    def _number(self, kind: Hashable) -> int:
        """Kinds as numbers: they are compared and hashed a hundred thousand times."""
        return self._kinds.setdefault(kind, len(self._kinds))

    def _add_call(self, node: Node) -> None:
        is_whole = node in self._kept_whole
        again = tuple(self._made_by(name).kind for name in REPEATABLE[node]) if node in REPEATABLE else None
        kind = self._number(("call", signature_of(node), PHASE.get(node), is_whole, node in DROPPED, again))
        if node.name in self.pinned:
            strategies, candidates = self._candidates(node, (self.pinned[node.name],))
        else:
            if kind not in self._priced:
                mesh, freedom = self.program.mesh, self.program.freedom
                freedom = replace(freedom, shards_parameters=False) if is_whole else freedom
                strategies = whole_axes(strategies_of(node, mesh, freedom), operand_dims(node), DIMS[node], mesh)
                strategies = of_copies(strategies, self.program) if node.target is held else strategies
                self._priced[kind] = self._candidates(node, strategies)
            strategies, candidates = self._priced[kind]
        reads = tuple(self.value_of(operand) for operand in operands(node))
        phase = PHASE.get(node) or "forward"
        self.nodes.append(AssignmentNode(node.name, reads, candidates, kind, is_view=_keeps_bytes(node), phase=phase))
        self.strategies.append(strategies)

    def _candidates(self, node: Node, strategies: tuple[Strategy, ...]) -> tuple[tuple[Strategy, ...], tuple[Candidate, ...]]:
        """One for each strategy, and another in which what would be kept is computed again."""
        candidates = tuple(self._candidate(node, strategy) for strategy in strategies)
        if node not in REPEATABLE:
            return strategies, candidates
        again = (replace(each, seconds=each.seconds + self._again_seconds(node, each.operands[0]), held_bytes=0.0) for each in candidates)
        return strategies * 2, (*candidates, *again)

    def _again_seconds(self, node: Node, state: State) -> float:
        """Of what gives the operand of `node`, as it is split in `state`, once more; what that is made of, at the least."""
        seconds = 0.0
        for name in REPEATABLE[node]:
            made = self._made_by(name).candidates
            seconds += min([each.seconds for each in made if state in each.results] or [each.seconds for each in made])
        return seconds

    def _made_by(self, name: str) -> AssignmentNode:
        return self.nodes[self.index[name]]

    def _candidate(self, node: Node, strategy: Strategy) -> Candidate:
        """What is saved is held; what any other op but a view reads and writes is there while it runs."""
        held_bytes = working = 0.0
        if node in DROPPED or (node.target is held and has_copy(operands(node)[0]) and self._is_over_batch(strategy.results[0])):
            pass  # computed again, or the parameter itself
        elif node.target in (save, held):
            held_bytes = self.cost.local_bytes(DIMS[node][0], node.meta["val"].dtype, strategy.results[0])
        elif self.budget.capacity_bytes < math.inf and not is_view(node):
            working = self.cost.traffic_bytes(node, strategy)
        return Candidate(strategy.operands, strategy.results, self.cost.node(node, strategy).seconds, held_bytes, working)

    def _is_over_batch(self, sharding: Sharding) -> bool:
        return any(map(self.program.freedom.is_batch, sharding.split_axes))

    def _add_result(self, output: Output, node: Node) -> None:
        """A result without an input that it belongs to."""
        target = required_sharding(output, node, self.program)
        kind = self._number(("result", output.kind, DIMS[node][0]))
        phase = PHASE.get(node) or "forward"
        strategies, candidates = self._or_summed_later((Strategy((target,), ()),), (Candidate((target,), (), 0.0),))
        self.nodes.append(AssignmentNode(f"result {output.name}", (self.value_of(node),), candidates, kind, phase=phase))
        self.strategies.append(strategies)


def required_sharding(output: Output, node: Node, program: Program) -> Sharding:
    """How a result that belongs to no input leaves: the user's output as its share of the batch, a loss whole."""
    batch = shared_atoms(output, node) if output.kind == "output" else ()
    return placeholder_strategies("tangent", DIMS[node][0], program.mesh, batch, program.freedom)[0].results[0]


def _keeps_bytes(node: Node) -> bool:
    """Whether `node` is a view of all of its one operand. A marked value may lie otherwise than what it is made of."""
    return (
        is_view(node)
        and node.target not in MARKERS
        and len(operands(node)) == 1
        and math.prod(map(math.prod, DIMS[node][0])) == math.prod(map(math.prod, operand_dims(node)[0]))
    )
