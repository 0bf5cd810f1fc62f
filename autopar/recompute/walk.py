"""What a rank holds while it runs one microbatch of a stage, call by call, read off a GLOBAL program.

Values count by the memory that they lie in, from the call that makes them to the last that reads them: views take none. Parameters, their
gradients and the optimizer's state are there all the time and are counted apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.ir.keys import RECOMPUTED, SOURCE
from autopar.ir.markers import MARKERS
from autopar.pipeline.priced import call_seconds, value_bytes
from autopar.pipeline.stage_work import Work
from autopar.recompute.choices import layer_of

# What is in no layer.
REST = ""


@dataclass(frozen=True)
class LayerMemory:
    """Of one layer, in bytes: what it keeps from its forward for its backward, and the most that is there while it is computed besides
    what the layers before it keep. `seconds` are what is computed again of it, each microbatch."""

    kept_bytes: float
    own_bytes: float
    seconds: float


@dataclass(frozen=True)
class StageMemory:
    """By layer, in the order of the forward; `REST` is what is in none."""

    layers: Mapping[str, LayerMemory]
    peak_bytes: float

    @property
    def kept_bytes(self) -> float:
        return sum(each.kept_bytes for each in self.layers.values())


def walk(work: Work, cost: CostModel, stage: int) -> StageMemory:
    """One microbatch through `stage`, forward and backward."""
    calls = [node for node in work.calls if stage in work.stages[node] and node not in work.per_step]
    values = _values(work, calls, cost)
    groups = {node: layer_of(SOURCE[node].module) if node in SOURCE else REST for node in (*calls, *values)}
    turn = next((place for place, node in enumerate(calls) if work.stages[node][stage] == "backward"), len(calls))
    order = list(dict.fromkeys(groups[node] for node in calls[:turn] if groups[node] != REST))
    kept = dict.fromkeys([*order, REST], 0.0)
    for value, each in values.items():
        if each.born < turn <= each.last:
            kept[groups[value] if groups[value] in kept else REST] += each.bytes
    # What is there for others while a layer is computed: the rest, and what the layers before it keep.
    others = dict(zip(order, itertools.accumulate((kept[layer] for layer in order), initial=kept[REST]), strict=False))
    own, seconds = dict.fromkeys(kept, 0.0), dict.fromkeys(kept, 0.0)
    live = _live(len(calls), values)
    for node, held in zip(calls, live, strict=True):
        layer = groups[node] if groups[node] in others else REST
        own[layer] = max(own[layer], held - others.get(layer, sum(kept.values())))
        seconds[layer] += call_seconds(node, work.program, cost) if node in RECOMPUTED else 0.0
    return StageMemory({layer: LayerMemory(kept[layer], own[layer], seconds[layer]) for layer in kept}, max(live, default=0.0))


class _Value(NamedTuple):
    """Memory of `bytes`, from the call at place `born` to that at `last`."""

    bytes: float
    born: int
    last: int


def _values(work: Work, calls: Sequence[Node], cost: CostModel) -> dict[Node, _Value]:
    """What takes memory of its own among what `calls` make, or read from other stages."""
    homes, found = dict[Node, Node](), dict[Node, _Value]()
    results = {node for output, node in work.program.named_outputs() if output.kind == "gradient"}
    counted = results if work.program.mesh.num_microbatches == 1 else set[Node]()  # with their parameters
    for place, node in enumerate(calls):
        for operand in node.all_input_nodes:
            if operand not in homes and operand.op == "call_function" and not _shows_input(operand) and operand not in work.per_step:
                homes[operand] = operand  # another stage made it
                found[operand] = _Value(value_bytes(operand, cost), place, place)
            if operand in homes:
                found[homes[operand]] = found[homes[operand]]._replace(last=place)
        if is_view(node) or node.target in MARKERS:
            if node.all_input_nodes and node.all_input_nodes[0] in homes:
                homes[node] = homes[node.all_input_nodes[0]]
        else:
            homes[node] = node
            found[node] = _Value(value_bytes(node, cost), place, place)
        if node in counted and node in homes:
            found[homes[node]] = found[homes[node]]._replace(bytes=0.0)
    return found


def _shows_input(node: Node) -> bool:
    while node.op == "call_function" and (is_view(node) or node.target in MARKERS) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _live(number: int, values: Mapping[Node, _Value]) -> list[float]:
    """Bytes while each of `number` calls runs, what it makes included."""
    made, dropped = [0.0] * (number + 1), [0.0] * (number + 1)
    for size, born, last in values.values():
        made[born] += size
        dropped[last + 1] += size
    return list(itertools.accumulate(a - b for a, b in zip(made[:number], dropped[:number], strict=True)))
