"""The values of a layer as the minimum cut weighs them, and which layers are alike."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Node

from autopar.cost.model import CostModel
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, SHARDING
from autopar.ir.markers import save
from autopar.ir.printing import op_name
from autopar.ir.program import Program
from autopar.ops.traits import MADE_ANEW
from autopar.pipeline.priced import call_seconds, value_bytes
from autopar.pipeline.stage_work import Work
from autopar.recompute.again import is_forward, reduces
from autopar.recompute.min_cut import KeptValue
from autopar.recompute.timeline import Again, BackwardCall, ForwardCall, Timeline
from autopar.recompute.walk import StageTrace


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a stage: its calls of the forward in order, those of them that may be computed again by `allowed`. What is `there` all
    step, such as copies of parameters, takes nothing more where it is read again."""

    name: str
    stage: int
    program: Program
    cost: CostModel = field(repr=False)
    calls: tuple[Node, ...] = field(repr=False)
    allowed: frozenset[str] = field(repr=False)
    there: frozenset[Node] = field(default=frozenset(), repr=False)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The calls that give `values`, first those of the layer."""
        found = dict.fromkeys(node for node in self.calls if shown_by(node) is node)
        read = (value for node in list(found) for value in _reads(node))
        return tuple(found | dict.fromkeys(read))

    @cached_property
    def values(self) -> tuple[KeptValue, ...]:
        places, own = {node: place for place, node in enumerate(self.nodes)}, set(self.calls)
        found: list[KeptValue] = []
        for node in self.nodes:
            saved = [user for user in _users(node) if user.target is save]
            reads = tuple(places[value] for value in _reads(node)) if node in own else ()
            seconds = call_seconds(node, self.program, self.cost) if node in own and node.name in self.allowed else math.inf
            # What others make is kept by them where the backward reads it.
            is_kept_anyway = node in self.there or (saved and node not in own)
            size = 0.0 if is_kept_anyway else sum(value_bytes(each, self.cost) for each in saved) or self._bytes(node)
            found.append(KeptValue(seconds, size, reads, bool(saved) and node in own))
        return tuple(found)

    def _bytes(self, node: Node) -> float:
        is_partial = any(each.unreduced for each in SHARDING[node])
        return math.inf if is_partial or not hasattr(node.meta["val"], "dtype") else value_bytes(node, self.cost)

    def timeline(self, stage: StageTrace) -> Timeline:
        """With what its calls do in the program that keeps all."""
        places, trace = {node: place for place, node in enumerate(self.nodes)}, stage.segments[self.name]
        own = frozenset(places[node] for node in self.calls if node in places)
        # Parts of a value lie in its memory.
        inside: dict[Node, list[int]] = {}
        for node, place in places.items():
            inside.setdefault(stage.homes.get(node, node), []).append(place)

        def known(nodes: Sequence[Node]) -> tuple[int, ...]:
            return tuple(place for node in nodes for place in inside.get(node, ()))

        backward = tuple(BackwardCall(known(each.values), each.before_bytes, each.during_bytes) for each in trace.backward)
        forward = tuple(
            ForwardCall(each.during_bytes, tuple(place for place in known(each.values) if place in own)) for each in trace.forward
        )
        sizes = tuple(stage.sizes.get(node, 0.0) for node in self.nodes)
        together = tuple(tuple(each) for each in inside.values() if len(each) > 1)
        within = {places[node]: size for node, size in stage.inside.items() if size and node in places}
        return Timeline(self.values, sizes, own, backward, forward, together, within)

    @cached_property
    def kind(self) -> Hashable:
        """Equal for layers of which the same is worth keeping: what they read of others, as the first one does, does not count."""
        own = set(self.calls)
        lies = tuple((op_name(node.target), DIMS[node], SHARDING[node]) for node in self.calls)
        inside = tuple(
            (tuple(read for read in each.reads if self.nodes[read] in own), each.bytes, each.seconds, each.is_wanted)
            for node, each in zip(self.nodes, self.values, strict=True)
            if node in own
        )
        return self.stage, lies, inside

    def names(self, chosen: Again) -> frozenset[str]:
        """The calls that are computed again, by name, changes of sharding and views apart."""
        return frozenset(self.nodes[number].name for number in chosen)


def shown_by(node: Node) -> Node:
    """The value that `node` shows: views, and changes of sharding that complete no sum, come with it."""
    while node.op == "call_function" and (node.target in MADE_ANEW or (node.target is reshard and not reduces(node))):
        (node,) = node.all_input_nodes[:1]
    return node


def _reads(node: Node) -> Iterator[Node]:
    values = (shown_by(operand) for operand in node.all_input_nodes)
    yield from dict.fromkeys(value for value in values if is_forward(value))


def _users(node: Node) -> Iterator[Node]:
    """What reads `node` in the forward, `save` nodes among it, through views and changes of sharding."""
    for user in node.users:
        if user.op == "call_function" and is_forward(user):
            yield user
            if shown_by(user) is not user:
                yield from _users(user)


def layers_of(work: Work, cost: CostModel, groups: dict[Node, str], stages: dict[Node, int], allowed: frozenset[str]) -> Sequence[Layer]:
    """The layers in the order of the forward, those that stages share apart."""
    found: dict[tuple[int, str], list[Node]] = {}
    for node, name in groups.items():
        if node.target is not save:
            found.setdefault((stages[node], name), []).append(node)
    return [Layer(name, stage, work.program, cost, tuple(calls), allowed, work.per_step) for (stage, name), calls in found.items()]
