"""Where and how often each call of a GLOBAL program runs in a step.

    stages   a call with a STAGE runs there; one without is computed by every stage that reads it, in the forward where a
             forward call of that stage reads it, and so is a view of what another stage has sent
    once     calls that run once a step, not for each microbatch: what follows from sums over the microbatches that are known
             ahead (a count of tokens), and what is done to the sums of losses and gradients at the end
    crossing values that one stage sends another, each microbatch

A program that nobody placed is one stage. What is said here of a GLOBAL program is what `copy to stages` and `cut_stages` make
of the LOCAL one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.fx import Node

from autopar.cost.model import is_view
from autopar.graph.microbatches import known_ahead
from autopar.ir.actions import Direction
from autopar.ir.collectives import reshard
from autopar.ir.keys import PHASE, SHARDING, STAGE, Phase
from autopar.ir.markers import MARKERS
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Program
from autopar.ops.traits import WHOLE_VIEWS

aten = torch.ops.aten

# Ops that only move elements: at the end of a gradient's way they are done to the sum over the microbatches.
_MOVES = WHOLE_VIEWS | {reshard, aten.clone.default}


class Tie(NamedTuple):
    """The sum over the microbatches of a gradient's `part`, which stage `source` makes and `targets` want as well."""

    part: Node
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """Reads: STAGE, PHASE, SHARDING of a program with its reshards."""

    program: Program

    @cached_property
    def calls(self) -> tuple[Node, ...]:
        return tuple(node for node in self.program.graph.nodes if node.op == "call_function")

    @cached_property
    def stages(self) -> dict[Node, dict[int, Phase]]:
        """For each call the stages that compute it, and when each does."""
        is_placed = any(node in STAGE for node in self.calls)
        found: dict[Node, dict[int, Phase]] = {}
        for node in reversed(self.calls):
            own = STAGE.get(node) if is_placed else 0
            moves = is_placed and node.target in WHOLE_VIEWS | MARKERS and _operand(node).op == "call_function"
            found[node] = {own: PHASE.get(node) or "forward"} if own is not None and not moves else self._readers(node, own, found)
        return found

    def _readers(self, node: Node, own: int | None, known: dict[Node, dict[int, Phase]]) -> dict[int, Phase]:
        found: dict[int, Phase] = {}
        for user in node.users:
            for stage, phase in known[user].items() if user in known and user not in self.dropped else ():
                found[stage] = "forward" if phase == "forward" else found.get(stage, phase)
        if not found or any(user.op == "output" for user in node.users):
            found.setdefault(own or 0, "forward")  # what only the caller reads is the first stage's
        if own in found:
            found[own] = PHASE.get(node) or "forward"
        return dict(sorted(found.items()))

    @cached_property
    def once(self) -> frozenset[Node]:
        if self.program.mesh.num_microbatches == 1:
            return frozenset()
        return frozenset(self._counted() | self.finishing | self.dropped)

    def runs(self, node: Node) -> int:
        """How often each stage of `node` computes it in a step."""
        return 1 if node in self.once else self.program.mesh.num_microbatches

    def calls_at(self, stage: int) -> Iterator[tuple[Node, Phase]]:
        """The calls of a stage for every microbatch, in order."""
        for node in self.calls:
            if stage in self.stages[node] and node not in self.once:
                yield node, self.stages[node][stage]

    def saved(self, stage: int, without: frozenset[Node] = frozenset()) -> tuple[Node, ...]:
        """The forward's values that the backward of a stage reads, its own or what came in; those that only calls of `without`
        read left out."""
        found: dict[Node, None] = {}
        for node, phase in self.calls_at(stage):
            for operand in node.all_input_nodes if phase == "backward" and node not in without else ():
                value = _unmarked(operand)
                if value in self.stages and value not in self.once and self._is_kept(value, stage):
                    found[value] = None
        return tuple(found)

    def _is_kept(self, node: Node, stage: int) -> bool:
        """Whether what the backward of a stage reads is there since the forward. A view of an input needs no memory."""
        phases = self.stages[node]
        return phases.get(stage, next(iter(phases.values()))) == "forward" and not _shows_input(node)

    @cached_property
    def crossing(self) -> dict[tuple[int, int, Direction], tuple[Node, ...]]:
        """The values that go from stage to stage: activations forward, gradients back."""
        found: dict[tuple[int, int, Direction], dict[Node, None]] = {}
        for node in self.calls:
            for operand in node.all_input_nodes if node not in self.once else ():
                if operand in STAGE and operand not in self.once:
                    source = STAGE[operand]
                    for stage in set(self.stages[node]).difference(self.stages[operand]):
                        direction: Direction = "F" if source < stage else "B"
                        found.setdefault((source, stage, direction), {})[operand] = None
        return {ends: tuple(values) for ends, values in found.items()}

    def waited_for(self, stage: int) -> frozenset[Node]:
        """The backward calls of a stage that its gradients for other stages descend from."""
        own = {node for node, phase in self.calls_at(stage) if phase == "backward"}
        sent = [node for (source, _, direction), nodes in self.crossing.items() if (source, direction) == (stage, "B") for node in nodes]
        found: set[Node] = set()
        stack = [node for node in sent if node in own]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += own.intersection(node.all_input_nodes)
        return frozenset(found)

    def reading(self, value: Node) -> frozenset[int]:
        """The stages that read an input."""
        return frozenset(stage for user in value.users for stage in self.stages.get(user, ()))

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """What stages exchange once a step: gradients of parameters that several hold, or another than the one that makes them."""
        if self.program.mesh.num_microbatches == 1:
            return ()
        readers = {item.name: self.reading(node) for item, node in self.program.named_inputs() if item.kind == "parameter"}
        found: list[Tie] = []
        for output, node in self.program.named_outputs():
            if output.kind == "gradient" and node.op == "call_function":
                parts = [part for part in self._parts(_before(node)) if part in STAGE]
                wanting = readers[output.name] or {STAGE[part] for part in parts}
                found += [Tie(part, STAGE[part], tuple(sorted(wanting - {STAGE[part]}))) for part in parts]
        return tuple(tie for tie in found if tie.targets)

    def _parts(self, node: Node) -> Iterator[Node]:
        if node in self.dropped:
            for source in node.all_input_nodes:
                yield from self._parts(source)
        else:
            yield node

    def _counted(self) -> set[Node]:
        """Sums over the microbatches that are known ahead, and what follows from them alone."""
        ahead = known_ahead(self.program)
        changing = {node for item, node in self.program.named_inputs() if item.sharding and MICROBATCHES in item.sharding.axes}
        found: set[Node] = set()
        for node in self.calls:
            operands = node.all_input_nodes
            if node not in ahead or changing.intersection(operands):
                continue
            calls = [each for each in operands if each.op == "call_function"]
            if _sums_microbatches(node) or (calls and all(each in found for each in calls)):
                found.add(node)
        return found

    @cached_property
    def _ends(self) -> dict[Node, None]:
        """Where the ways begin that only move a loss or a gradient to its place."""
        return dict.fromkeys(_before(node) for node in self._results())

    def _results(self) -> Iterator[Node]:
        ahead = known_ahead(self.program)
        for output, node in self.program.named_outputs():
            if output.kind in ("loss", "gradient") and node.op == "call_function" and node not in ahead:
                yield node

    @cached_property
    def finishing(self) -> set[Node]:
        """What is done to losses and gradients that are complete but for the sum over the microbatches."""
        return {node for result in self._results() for node in _way_to(result)}

    @cached_property
    def dropped(self) -> frozenset[Node]:
        """Additions of gradients from several stages: the addends are summed over the microbatches first."""
        if self.program.mesh.num_microbatches == 1:
            return frozenset()
        found: set[Node] = set()
        stack = list(self._ends)
        while stack:
            node = stack.pop()
            if _joins_stages(node):
                found.add(node)
                stack += node.all_input_nodes
        return frozenset(found)


def _way_to(result: Node) -> Iterator[Node]:
    while result.target in _MOVES and len(result.users) == 1 and _operand(result).op == "call_function":
        yield result
        result = _operand(result)


def _before(result: Node) -> Node:
    way = list(_way_to(result))
    return _operand(way[-1]) if way else result


def _operand(node: Node) -> Node:
    return node.all_input_nodes[0]


def _unmarked(node: Node) -> Node:
    while node.target in MARKERS:
        node = _operand(node)
    return node


def _shows_input(node: Node) -> bool:
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = _operand(node)
    return node.op == "placeholder"


def _joins_stages(node: Node) -> bool:
    sources = node.all_input_nodes
    is_tie = node.target is aten.add.Tensor and len(sources) == 2 and STAGE.get(sources[0]) != STAGE.get(sources[1])
    return is_tie and _are_gradients(sources) and len(node.users) == 1


def _are_gradients(nodes: Iterable[Node]) -> bool:
    return all(each.op == "call_function" and PHASE.get(each) == "backward" for each in nodes)


def _sums_microbatches(node: Node) -> bool:
    if node.target is not reshard:
        return False
    before, after = SHARDING[_operand(node)][0], SHARDING[node][0]
    return any(axis == MICROBATCHES for axis, _ in before.unreduced) and MICROBATCHES not in after.axes
