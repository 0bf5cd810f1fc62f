"""A LOCAL program of a pipeline in pieces: what each action computes, what stages send, what is summed over the microbatches.

ahead    for every microbatch, before the first: what the sums over the microbatches that the network reads are made of
once     what follows from those sums alone (a token count, summed over dp)
F B I W  one microbatch through one stage: forward; backward, whole or as the gradients that other stages wait for
         and the rest
after    what is done to the sums of losses and gradients: changes of sharding, once a step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autopar.graph.microbatches import is_summed_later, known_ahead
from autopar.ir.actions import Direction, Edge, Kind
from autopar.ir.collectives import LAUNCHES, is_launch, wait
from autopar.ir.keys import PHASE, STAGE
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Input, Output, Program
from autopar.ir.sharding import Sharding
from autopar.ops.traits import WHOLE_VIEWS

aten = torch.ops.aten

# Ops that only move the elements of their first operand: they may as well be done to a sum as to its parts.
_MOVES = WHOLE_VIEWS | {aten.clone.default, aten.slice.Tensor, aten.index_select.default, wait, *LAUNCHES}


@dataclass(frozen=True)
class Sum:
    """A result that is summed over the microbatches: `parts` are its addends of one microbatch, each of another stage.

    `stages` are where it is wanted: those that hold the parameter whose gradient it is. `after` is what follows there.
    `target` is the node whose value the sum takes the place of.
    """

    output: Output
    target: Node
    parts: tuple[Node, ...]
    after: tuple[Node, ...]
    stages: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        """Whether one stage makes it, and wants it alone."""
        return len({*self.stages, *(stage_of(part) for part in self.parts)}) == 1


@dataclass(frozen=True)
class StageCut:
    """A LOCAL program in pieces, those of each stage in the order of the graph.

    `counted` are the sums over microbatches that are taken ahead: (what is added, the collective it stands for)."""

    program: Program
    num_stages: int
    ahead: Mapping[int, tuple[Node, ...]]
    counted: Mapping[int, tuple[tuple[Node, Node], ...]]
    once: Mapping[int, tuple[Node, ...]]
    actions: Mapping[tuple[int, Kind], tuple[Node, ...]]
    transfers: Mapping[tuple[int, int, Direction], tuple[Node, ...]]
    sums: tuple[Sum, ...]

    @property
    def edges(self) -> tuple[Edge, ...]:
        pairs = sorted({(min(source, target), max(source, target)) for source, target, _ in self.transfers})
        return tuple(Edge(*pair, (pair[1], pair[0], "B") in self.transfers) for pair in pairs)

    @property
    def per_step(self) -> frozenset[Node]:
        """The calls whose values there is one of a step, not one of a microbatch."""
        found = {node for nodes in self.once.values() for node in nodes} | {node for each in self.sums for node in each.after}
        return frozenset(found | {launch for pairs in self.counted.values() for _, launch in pairs})


def cut_stages(program: Program, num_stages: int) -> StageCut:
    """Cut a LOCAL program of which every call has a stage, or none has, and no value of the loop is reduced over `mb`."""
    return _Cut(program, num_stages).stages()


@dataclass
class _Cut:
    program: Program
    num_stages: int
    calls: list[Node] = field(default_factory=list[Node])

    def stages(self) -> StageCut:
        self.calls = [node for node in self.program.graph.nodes if node.op == "call_function"]
        counted = [node for node in self.calls if is_launch(node) and node.args[1] == (MICROBATCHES,)]
        once = self._once(counted)
        sums = tuple(self._sums())
        ahead = _ancestors(each.all_input_nodes[0] for each in counted) - once
        aside = ahead | once | {node for each in sums for node in each.after} | _dropped(sums)
        loop = [node for node in self.calls if node not in aside]
        transfers = self._transfers(loop)
        return StageCut(
            self.program,
            self.num_stages,
            self._by_stage(ahead),
            {s: tuple((_operand(n), n) for n in counted if stage_of(n) == s) for s in range(self.num_stages)},
            self._by_stage(once - set(counted) - {user for node in counted for user in node.users}),
            self._actions(loop, transfers),
            transfers,
            sums,
        )

    def _by_stage(self, nodes: Iterable[Node]) -> dict[int, tuple[Node, ...]]:
        chosen = set(nodes)
        return {stage: tuple(node for node in self.calls if node in chosen and stage_of(node) == stage) for stage in range(self.num_stages)}

    def _once(self, counted: Iterable[Node]) -> set[Node]:
        """The sums that are taken ahead and all that follows from them and from what does not change with the microbatch."""
        ahead, found = known_ahead(self.program), set(counted)
        changing = {node for item, node in self.program.named_inputs() if differs(item)}
        for node in self.calls:
            operands = node.all_input_nodes
            calls = [each for each in operands if each.op == "call_function"]
            if node in ahead and calls and all(each in found for each in calls) and not changing.intersection(operands):
                found.add(node)
        return found

    def _sums(self) -> Iterator[Sum]:
        """Of one microbatch there is no sum but where several stages have parts of a gradient, or want it."""
        if self.program.mesh.num_microbatches > 1:
            yield from (self._sum(output, node) for output, node in self.program.named_outputs() if is_summed_later(_sharding(output)))
            return
        named = self.program.named_outputs()
        gradients = [self._sum(output, node) for output, node in named if output.kind == "gradient" and node.op == "call_function"]
        chosen = [each for each in gradients if not each.is_local]
        # Equal gradients of several parameters are one: what is done to it once is done once for all of them.
        while alike := [each for each in gradients if each not in chosen and any(_is_shared(each, other) for other in chosen)]:
            chosen += alike
        yield from (each for each in gradients if each in chosen)

    def _sum(self, output: Output, result: Node) -> Sum:
        after: list[Node] = []
        node = result
        while _is_moved(node):
            after.append(node)
            node = _operand(node)
        # The chain from the end to what is moved, with whatever else its calls read (a rank's index).
        helpers = [each for call in after for each in call.all_input_nodes[1:] if each.op == "call_function"]
        ordered = [each for each in self.calls if each in set(after) | set(helpers)]
        parts = tuple(_parts(node))
        stages = readers_of(self.program, output) or {stage_of(part) for part in parts}
        return Sum(output, node, parts, tuple(ordered), tuple(sorted(stages)))

    def _transfers(self, loop: list[Node]) -> dict[tuple[int, int, Direction], tuple[Node, ...]]:
        found: dict[tuple[int, int, Direction], dict[Node, None]] = {}
        inside = set(loop)
        for node in loop:
            for operand in node.all_input_nodes:
                source, target = stage_of(operand), stage_of(node)
                if operand in inside and source != target:
                    is_forward = PHASE[operand] == "forward" and source < target
                    assert is_forward or (source > target and PHASE[node] == "backward"), f"{node} reads {operand} against the pipeline"
                    found.setdefault((source, target, "F" if is_forward else "B"), {})[operand] = None
        return {key: tuple(values) for key, values in found.items()}

    def _actions(
        self, loop: list[Node], transfers: Mapping[tuple[int, int, Direction], tuple[Node, ...]]
    ) -> dict[tuple[int, Kind], tuple[Node, ...]]:
        found: dict[tuple[int, Kind], tuple[Node, ...]] = {}
        for stage in range(self.num_stages):
            mine = [node for node in loop if stage_of(node) == stage]
            backward = [node for node in mine if PHASE[node] == "backward"]
            sent = [node for (source, _, direction), nodes in transfers.items() if source == stage and direction == "B" for node in nodes]
            waited = _ancestors(sent)
            found[stage, "F"] = tuple(node for node in mine if PHASE[node] == "forward")
            found[stage, "B"] = tuple(backward)
            found[stage, "I"] = tuple(node for node in backward if node in waited)
            found[stage, "W"] = tuple(node for node in backward if node not in waited)
        return found


def readers_of(program: Program, output: Output) -> set[int]:
    """The stages that read the parameter of a gradient; of another output none."""
    if output.kind != "gradient":
        return set()
    parameter = next(node for item, node in program.named_inputs() if (item.kind, item.name) == ("parameter", output.name))
    return {stage_of(user) for user in parameter.users if user.op == "call_function"}


def stage_of(node: Node) -> int:
    """The stage of a call; the only one where nobody placed any."""
    return STAGE.get(node) or 0


def differs(item: Input) -> bool:
    """Whether an input differs from microbatch to microbatch."""
    if item.kind == "coordinate":
        return MICROBATCHES in item.name.split(",")
    return item.sharding is not None and MICROBATCHES in item.sharding.axes


def _is_shared(one: Sum, other: Sum) -> bool:
    return not {one.target, *one.after}.isdisjoint((other.target, *other.after))


def _sharding(output: Output) -> Sharding:
    assert output.sharding is not None, output
    return output.sharding


def _operand(node: Node) -> Node:
    operand = node.args[0]
    assert isinstance(operand, Node)
    return operand


def _is_moved(node: Node) -> bool:
    """Whether `node`, which nothing else reads, moves the elements of a call, or adds them up: a maximum of sums is no sum of maxima."""
    is_maximum = is_launch(node) and node.args[-1] == "max"
    return node.target in _MOVES and not is_maximum and len(node.users) == 1 and _operand(node).op == "call_function"


def _parts(node: Node) -> Iterator[Node]:
    """The addends of a sum of gradients that come from different stages; the node itself where it is none."""
    sources = node.all_input_nodes
    is_tie = node.target is aten.add.Tensor and len(sources) == 2 and len({stage_of(each) for each in sources}) > 1
    if is_tie and all(each.op == "call_function" and PHASE[each] == "backward" for each in sources) and len(node.users) == 1:
        for source in sources:
            yield from _parts(source)
    else:
        yield node


def _dropped(sums: Iterable[Sum]) -> set[Node]:
    """The additions that are left out because their addends are summed at the end of the step."""
    found: set[Node] = set()
    for each in sums:
        found |= _ancestors([each.target], stop=frozenset(each.parts)) - set(each.parts)
    return found


def _ancestors(nodes: Iterable[Node], stop: frozenset[Node] = frozenset()) -> set[Node]:
    """`nodes` and every call that they descend from, no further than `stop`."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function":
            found.add(node)
            stack += [] if node in stop else node.all_input_nodes
    return found
