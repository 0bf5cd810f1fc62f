"""From a GLOBAL program to an assignment problem: nodes are ops, inputs and results; candidates strategies; states shardings.

A parameter reads its own gradient, so that both take one sharding; a tangent reads the output it belongs to, a buffer
its new value. The loss and the other results are readers that want them whole. A `getitem` is no node: it names a result.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from autopar.assignment import Candidate, Choice, Problem, State, ValueIndex
from autopar.cost import CostModel
from autopar.keys import BATCH, DIMS, PHASE
from autopar.program import Input, Output, Program, operands, results_of
from autopar.reshard import is_slice
from autopar.sharding import Dims, Sharding, Strategy
from autopar.strategies import placeholder_strategies, space_of, strategies_of

# The result that is read by the input of this kind and name: where it must be left.
_HOME = {"gradient": "parameter", "buffer": "buffer", "output": "tangent"}


@dataclass
class ShardingProblem:
    """`problem` with what its nodes stand for: `strategies[i]` of node i, `index[name]` of a graph node."""

    problem: Problem
    index: dict[str, int]
    strategies: list[tuple[Strategy, ...]]

    @staticmethod
    def of(program: Program, cost: CostModel, pinned: Mapping[str, Strategy]) -> ShardingProblem:
        """The problem of `program`, which has DIMS and BATCH. The nodes named in `pinned` have that strategy alone."""
        builder = _Builder(program, cost, pinned)
        builder.build()
        problem = Problem(tuple(builder.nodes), builder.price, _slices)
        return ShardingProblem(problem, builder.index, builder.strategies)


def _slices(state: State, other: State) -> bool:
    assert isinstance(state, Sharding) and isinstance(other, Sharding)
    return is_slice(state, other)


@dataclass
class _Builder:
    program: Program
    cost: CostModel
    pinned: Mapping[str, Strategy]
    nodes: list[Choice] = field(default_factory=list[Choice])
    index: dict[str, int] = field(default_factory=dict[str, int])
    strategies: list[tuple[Strategy, ...]] = field(default_factory=list[tuple[Strategy, ...]])
    _of_index: list[Node] = field(default_factory=list[Node])
    _priced: dict[Hashable, tuple[tuple[Strategy, ...], tuple[Candidate, ...]]] = field(default_factory=dict)

    def build(self) -> None:
        calls = [node for node in self.program.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
        self._of_index = [*self.program.placeholders, *calls]
        self.index = {node.name: number for number, node in enumerate(self._of_index)}
        homes = {(item.kind, item.name): node for item, node in self.program.named_inputs()}
        left: dict[Node, Node] = {}
        for output, node in self.program.named_outputs():
            home = homes.get((_HOME.get(output.kind), output.name))  # type: ignore[arg-type]
            if home is not None:
                left[home] = node
        for item, node in self.program.named_inputs():
            self._add_input(item, node, left.get(node))
        for node in calls:
            self._add_call(node)
        for output, node in self.program.named_outputs():
            if (_HOME.get(output.kind), output.name) not in homes:
                self._add_result(output, node)

    def value_of(self, node: Node) -> ValueIndex:
        if node.target is operator.getitem:
            producer, result = node.args
            assert isinstance(producer, Node) and isinstance(result, int)
            return self.index[producer.name], result
        return self.index[node.name], 0

    def price(self, value: ValueIndex, source: State, target: State) -> float:
        assert isinstance(source, Sharding) and isinstance(target, Sharding)
        node = self._of_index[value[0]]
        tensor = results_of(node)[value[1]]
        assert tensor is not None
        return self.cost.reshard(DIMS[node][value[1]], tensor.dtype.itemsize, source, target).seconds

    def _add_input(self, item: Input, node: Node, left: Node | None) -> None:
        """`left` is the result that must be left where this input lies."""
        dims = DIMS[node][0]
        strategies = placeholder_strategies(item.kind, dims, self.program.mesh, BATCH[node][0])
        if node.name in self.pinned:
            strategies = (self.pinned[node.name],)
        reads = () if left is None else (self.value_of(left),)
        candidates = tuple(self._input_candidate(item, dims, strategy, len(reads)) for strategy in strategies)
        kind = ("input", item.kind, dims, item.dtype, item.requires_grad)
        self.nodes.append(Choice(node.name, reads, candidates, kind))
        self.strategies.append(strategies)

    def _input_candidate(self, item: Input, dims: Dims, strategy: Strategy, num_reads: int) -> Candidate:
        sharding = strategy.results[0]
        seconds = self.cost.parameter(dims, item.dtype, sharding, item.requires_grad).seconds if item.kind == "parameter" else 0.0
        return Candidate((sharding,) * num_reads, (sharding,), seconds)

    def _add_call(self, node: Node) -> None:
        kind = _kind(node)
        if node.name in self.pinned:
            strategies = (self.pinned[node.name],)
            candidates = self._candidates(node, strategies)
        else:
            if kind not in self._priced:
                strategies = strategies_of(node, self.program.mesh)
                self._priced[kind] = (strategies, self._candidates(node, strategies))
            strategies, candidates = self._priced[kind]
        reads = tuple(self.value_of(operand) for operand in operands(node))
        self.nodes.append(Choice(node.name, reads, candidates, kind))
        self.strategies.append(strategies)

    def _candidates(self, node: Node, strategies: tuple[Strategy, ...]) -> tuple[Candidate, ...]:
        return tuple(Candidate(each.operands, each.results, self.cost.node(node, each).seconds) for each in strategies)

    def _add_result(self, output: Output, node: Node) -> None:
        """A result without an input that it belongs to leaves whole."""
        dims = DIMS[node][0]
        whole = Sharding.replicated(dims)
        self.nodes.append(Choice(f"result {output.name}", (self.value_of(node),), (Candidate((whole,), (), 0.0),), ("result", output.kind, dims)))
        self.strategies.append((Strategy((whole,), ()),))


def _kind(node: Node) -> Hashable:
    """Equal for calls that have equal strategies at equal cost, and do the same in the same phase."""
    reads = operands(node)
    numbers = {operand: number for number, operand in enumerate(dict.fromkeys(reads))}
    literals = repr(_plain((node.args, node.kwargs), numbers))
    dtypes = tuple(value.dtype if value is not None else None for each in (*reads, node) for value in results_of(each))
    shapes = tuple(DIMS[each] for each in (*reads, node))
    return str(node.target), literals, dtypes, shapes, space_of(node), PHASE.get(node)


def _plain(value: object, numbers: Mapping[Node, int]) -> object:
    """Arguments with nodes as numbers."""
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item, numbers) for item in value)
    if isinstance(value, dict):
        return tuple((key, _plain(item, numbers)) for key, item in value.items())
    return value
