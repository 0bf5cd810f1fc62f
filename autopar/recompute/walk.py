"""What a rank holds while it runs one microbatch of a stage, call by call, read off a GLOBAL program.

Values count by the memory that they lie in, from the call that makes them to the last that reads them: views take none, nor does a product
that only what is added to it reads. What ops take within themselves counts while they run. Parameters and the optimizer's state are there
all the time and are counted apart, and so are gradients that are summed, over microbatches or ranks; others count from the call that makes
them.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.ir.collectives import reshard
from autopar.ir.keys import RECOMPUTED
from autopar.ir.markers import MARKERS
from autopar.pipeline.priced import call_seconds, value_bytes
from autopar.pipeline.stage_work import Work
from autopar.recompute.again import reduces
from autopar.recompute.inside import InsideBytes
from autopar.recompute.segments import segments, segments_of_backward

aten = torch.ops.aten


@dataclass(frozen=True)
class LayerMemory:
    """Of one segment, in bytes: what it keeps from its forward for its backward, and the most that is there while it is computed besides
    what the segments before it keep and `gradients_bytes`, those of segments behind it. `seconds` are what is computed again of it, each
    microbatch."""

    kept_bytes: float = 0.0
    own_bytes: float = 0.0
    seconds: float = 0.0
    gradients_bytes: float = 0.0


@dataclass(frozen=True)
class StageMemory:
    """By segment, in the order of the forward. `turn_bytes` are the most that the last of them makes for itself in the backward."""

    layers: Mapping[str, LayerMemory]
    peak_bytes: float
    gradients_bytes: float
    turn_bytes: float

    @property
    def kept_bytes(self) -> float:
        return sum(each.kept_bytes for each in self.layers.values())


class TracedCall(NamedTuple):
    """A call of a segment, where all is kept.

    Of the backward: the values of the forward that it reads, and bytes of what the backward made for the segment, before the call and
    while it runs. Of the forward: the values that nothing behind it in the forward reads, and bytes while it runs besides what the
    segments before it keep.
    """

    values: tuple[Node, ...]
    before_bytes: float
    during_bytes: float


@dataclass(frozen=True)
class Trace:
    forward: tuple[TracedCall, ...]
    backward: tuple[TracedCall, ...]


class StageTrace(NamedTuple):
    """The calls of each segment, the bytes of each memory by the node that makes it, by node the one in whose memory it lies, and what
    each call takes within itself."""

    segments: Mapping[str, Trace]
    sizes: Mapping[Node, float]
    homes: Mapping[Node, Node]
    inside: Mapping[Node, float]


def trace(work: Work, cost: CostModel, stage: int, inside: InsideBytes) -> StageTrace:
    """What `walk` counts, call by call."""
    found = _Walk(work, cost, stage, _calls(work, stage), inside)
    sizes = {node: each.bytes for node, each in found.values.items()}
    return StageTrace(found.traces(), sizes, found.homes, dict(zip(found.calls, found.inside_of, strict=True)))


def walk(work: Work, cost: CostModel, stage: int, inside: InsideBytes) -> StageMemory:
    """One microbatch through `stage`, forward and backward."""
    return _Walk(work, cost, stage, _calls(work, stage), inside).memory()


def _calls(work: Work, stage: int) -> list[Node]:
    return [node for node in work.calls if stage in work.stages[node] and node not in work.per_step]


@dataclass
class _Walk:
    work: Work
    cost: CostModel
    stage: int
    calls: Sequence[Node]
    inside: InsideBytes

    def __post_init__(self) -> None:
        phases = [self.work.stages[node][self.stage] for node in self.calls]
        # Where the backward begins.
        self.turn = next((place for place, phase in enumerate(phases) if phase == "backward"), len(phases))
        made_in = segments(self.work.program)
        self.names = list(dict.fromkeys(made_in[node] for node in self.calls[: self.turn] if node in made_in))
        backward = segments_of_backward(self.calls[self.turn :], self.names)
        # By call the segment in which it runs, and that of whatever it is a copy of.
        self.runs_in = [made_in.get(node) or backward.get(node, "") for node in self.calls]
        by_name = {node.name: segment for node, segment in made_in.items()}
        self.counts_to = [by_name.get(RECOMPUTED.get(node) or "", here) for node, here in zip(self.calls, self.runs_in, strict=True)]
        self.inside_of = [self.inside.of(node) for node in self.calls]
        self.gradients = set[Node]()
        # By node that in whose memory it lies; by call the memories that it reads.
        self.homes, self.reads = dict[Node, Node](), list[dict[Node, None]]()
        self.values = self._values()
        self.kept = dict.fromkeys(self.names, 0.0)
        for each in self.values.values():
            if each.born < self.turn <= each.last and self.runs_in[each.born] in self.kept:
                self.kept[self.runs_in[each.born]] += each.bytes
        # What is there for others while a segment is computed: what the segments before it keep, and gradients of those behind it.
        sizes = itertools.accumulate((self.kept[name] for name in self.names), initial=0.0)
        self.others = dict(zip(self.names, sizes, strict=False))

    def memory(self) -> StageMemory:
        own, before, others = dict.fromkeys(self.names, 0.0), dict.fromkeys(self.names, 0.0), self.others
        live, of_gradients = self._live_with_inside(self.values.values()), self._gradients_of_others()
        for segment, held, others_gradients in zip(self.runs_in, live, of_gradients, strict=True):
            if segment in own:
                own[segment] = max(own[segment], held - others[segment] - others_gradients)
                before[segment] = max(before[segment], others_gradients)
        seconds = dict.fromkeys(self.names, 0.0)
        for node, segment in zip(self.calls, self.counts_to, strict=True):
            if node in RECOMPUTED and segment in seconds:
                seconds[segment] += call_seconds(node, self.work.program, self.cost)
        found = {name: LayerMemory(self.kept[name], own[name], seconds[name], before[name]) for name in self.names}
        gradients = sum(self.values[node].bytes for node in self.gradients)
        return StageMemory(found, max(live, default=0.0), gradients, self._turn_bytes())

    def traces(self) -> Mapping[str, Trace]:
        found: dict[str, tuple[list[TracedCall], list[TracedCall]]] = {name: ([], []) for name in self.names}
        live = self._live_with_inside(self.values.values())
        made = [each for each in self.values.values() if each.born >= self.turn]
        during, of_gradients = self._live_with_inside(made), self._gradients_of_others()
        born, over = defaultdict[int, float](float), defaultdict[int, list[Node]](list)
        for each in made:
            born[each.born] += each.bytes
        last = {node: each.born for node, each in self.values.items() if each.born < self.turn}
        last |= {node: place for place, reads in enumerate(self.reads[: self.turn]) for node in reads}
        for node, place in last.items():
            over[place].append(node)
        for place, (segment, held, others) in enumerate(zip(self.runs_in, live, of_gradients, strict=True)):
            forward, backward = found.get(segment, ([], []))
            if place < self.turn:
                forward.append(TracedCall(tuple(over[place]), held - self.others.get(segment, 0.0), held - self.others.get(segment, 0.0)))
            else:
                own = during[place] - others
                before = own - born[place] - self.inside_of[place]
                backward.append(TracedCall(tuple(self.reads[place]), before, own))
        return {name: Trace(tuple(forward), tuple(backward)) for name, (forward, backward) in found.items()}

    def _gradients_of_others(self) -> list[float]:
        """By call the bytes of gradients that are there for other segments than its own."""
        born = {self.values[node].born: self.values[node].bytes for node in self.gradients}
        total, own, found = 0.0, dict[str, float](), list[float]()
        for place, segment in enumerate(self.runs_in):
            total += born.get(place, 0.0)
            own[segment] = own.get(segment, 0.0) + born.get(place, 0.0)
            found.append(total - own[segment])
        return found

    def _turn_bytes(self) -> float:
        made = [each for node, each in self.values.items() if each.born >= self.turn and node not in RECOMPUTED]
        live = zip(self.runs_in[self.turn :], self._live(made)[self.turn :], strict=True)
        return max((held for segment, held in live if segment == self.names[-1]), default=0.0) if self.names else 0.0

    def _live_with_inside(self, values: Iterable[_Value]) -> list[float]:
        return [sum(each) for each in zip(self._live(values), self.inside_of, strict=True)]

    def _live(self, values: Iterable[_Value]) -> list[float]:
        """Bytes while each call runs, what it makes included."""
        number = len(self.calls)
        made, dropped = [0.0] * (number + 1), [0.0] * (number + 1)
        for size, born, last in values:
            made[born] += size
            dropped[last + 1] += size
        return list(itertools.accumulate(a - b for a, b in zip(made[:number], dropped[:number], strict=True)))

    def _values(self) -> dict[Node, _Value]:
        """What takes memory of its own among what the calls make, or read from other stages."""
        homes, found = self.homes, dict[Node, _Value]()
        for place, node in enumerate(self.calls):
            self.reads.append({})
            for operand in node.all_input_nodes:
                is_known = operand in homes or operand.op != "call_function" or operand in self.work.per_step or _is_tuple(operand)
                if not is_known and not _shows_input(operand):
                    homes[operand] = operand  # another stage made it
                    found[operand] = _Value(value_bytes(operand, self.cost), place, place)
                if operand in homes:
                    found[homes[operand]] = found[homes[operand]]._replace(last=place)
                    self.reads[-1][homes[operand]] = None
            if node.target is not operator.getitem and (is_view(node) or node.target in MARKERS):
                if node.all_input_nodes and node.all_input_nodes[0] in homes:
                    homes[node] = homes[node.all_input_nodes[0]]
            elif not _is_tuple(node):
                homes[node] = node
                found[node] = _Value(0.0 if _is_added_to(node) else value_bytes(node, self.cost), place, place)
        if self.work.program.mesh.num_microbatches == 1:
            self._hold_gradients(found)
        return found

    def _hold_gradients(self, found: dict[Node, _Value]) -> None:
        """Those that are summed over ranks have their memory all the time, others from where they are made to the end."""
        for output, node in self.work.program.named_outputs():
            if output.kind == "gradient" and node in self.homes:
                home = self.homes[node]
                if _is_reduced(node):
                    found[home] = found[home]._replace(bytes=0.0)
                else:
                    found[home] = found[home]._replace(last=len(self.calls) - 1)
                    self.gradients.add(home)


class _Value(NamedTuple):
    """Memory of `bytes`, from the call at place `born` to that at `last`."""

    bytes: float
    born: int
    last: int


def _is_added_to(node: Node) -> bool:
    """Whether a bias is added to a product, and nothing else reads it: backends do both at once."""
    if node.target is not aten.mm.default or len(node.users) != 1:
        return False
    (user,) = node.users
    return user.target is aten.add.Tensor and any(_shows_input(operand) for operand in user.all_input_nodes if operand is not node)


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _is_reduced(gradient: Node) -> bool:
    while gradient.op == "call_function" and (is_view(gradient) or gradient.target is reshard) and gradient.all_input_nodes:
        if reduces(gradient):
            return True
        gradient = gradient.all_input_nodes[0]
    return False


def _shows_input(node: Node) -> bool:
    while node.op == "call_function" and (is_view(node) or node.target in MARKERS) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
