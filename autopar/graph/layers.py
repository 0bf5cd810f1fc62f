"""Runs of equal layers in a program: which calls are of which layer, and whether all layers compute and read alike.

    head  layer 0  layer 1  layer 2  layer 3  tail  layer 3  layer 2  layer 1  layer 0  head      a trace, forward and backward

Two layers are alike call by call: the op, its literals, its value, the line of code, and for each operand which call of the same layer or
of a layer beside it makes it, or which value that all layers read. The first layer may have other neighbours than the rest, in a
backward so may the last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.ir.keys import EXACT, SITE, SOURCE
from autopar.ir.program import Program, operands, results_of

# As many layers of a run are traced.
SHOWN = 4
# Below, tracing all layers takes no longer than to find out that they are alike.
LEAST = 2 * SHOWN
FORWARD, BACKWARD = "forward", "backward"


class NotRepeatedError(Exception):
    """Layers are not alike; the text says where."""


@dataclass(frozen=True)
class LayerRun:
    """The layers of an `nn.ModuleList`: `number` of them under `path`, "model.layers"."""

    path: str
    number: int

    @property
    def num_hidden(self) -> int:
        """How many are not among those that are shown."""
        return self.number - SHOWN

    def layer_of(self, name: str) -> int | None:
        """The layer that a module or a parameter belongs to: 2 for "model.layers.2.mlp"."""
        if not name.startswith(f"{self.path}."):
            return None
        number = name[len(self.path) + 1 :].partition(".")[0]
        return int(number) if number.isdigit() else None

    def renamed(self, name: str, layer: object) -> str:
        """`name` with the number of its layer replaced; as it is where it belongs to none."""
        found = self.layer_of(name)
        return name if found is None else f"{self.path}.{layer}{name[len(f'{self.path}.{found}') :]}"


def run_of(program: Program) -> LayerRun | None:
    """The longest run of layers that the names of parameters tell of; None where none has `LEAST`."""
    found = defaultdict[str, set[int]](set)
    for item in program.signature.inputs_of("parameter"):
        for place in re.finditer(r"\.(\d+)(?=\.)", item.name):
            found[item.name[: place.start()]].add(int(place[1]))
    runs = [LayerRun(path, len(numbers)) for path, numbers in found.items() if numbers == set(range(len(numbers)))]
    return max((run for run in runs if run.number >= LEAST), key=lambda run: run.number, default=None)


@dataclass(frozen=True)
class Place:
    """Where a node stands: the layer, and which of its calls in the forward or backward it is, or which of its tensors (`kind`)."""

    kind: str
    layer: int
    position: int = 0

    def at(self, layer: int) -> Place:
        return Place(self.kind, layer, self.position)  # asked for each operand of each call, where `replace` is slow


# How a call reads an operand: one that all layers read, or a place, its layer counted from the reader's.
Way = Node | Place
Ways = list[tuple[Way, ...]]


class Layers:
    """The layers of a program that has `number` of those of `run`.

    `calls` has those of each layer, by `FORWARD` and, of a joint graph as it was traced, `BACKWARD`; `places` says of what they and the
    layers' tensors are. Raises `NotRepeatedError` where layers do not follow one another.
    """

    def __init__(self, program: Program, run: LayerRun, number: int) -> None:
        self.program, self.run, self.number = program, run, number
        self.places: dict[Node, Place] = {}
        for item, node in program.named_inputs():
            layer = run.layer_of(item.name) if item.kind in ("parameter", "buffer") else None
            if layer is not None:
                self.places[node] = Place(f"{item.kind} {run.renamed(item.name, '*')}", layer)
        self.calls = dict(self._found())
        for kind, layers in self.calls.items():
            for layer, nodes in enumerate(layers):
                self.places |= {node: Place(kind, layer, position) for position, node in enumerate(nodes)}

    def _found(self) -> Iterator[tuple[str, list[list[Node]]]]:
        nodes = [node for node in self.program.graph.nodes if node.op == "call_function"]
        layers = [self.run.layer_of(SOURCE[node].module) if node in SOURCE else None for node in nodes]
        bounds: list[tuple[int, int, int]] = []  # (layer, the first of its calls, the last)
        for index, layer in enumerate(layers):
            if layer is not None and bounds and bounds[-1][0] == layer:
                bounds[-1] = (layer, bounds[-1][1], index)
            elif layer is not None:
                bounds.append((layer, index, index))
        if len(bounds) == 2 * self.number - 1:  # forward and backward of the last layer, with what follows the layers between them
            layer, first, last = bounds.pop(self.number - 1)
            end = first + bounds[self.number - 2][2] - bounds[self.number - 2][1]  # its forward is as long as that before it
            behind = next(index for index in range(end + 1, last + 1) if layers[index] == layer)
            bounds[self.number - 1 : self.number - 1] = [(layer, first, end), (layer, behind, last)]
        forward = list(range(self.number))
        if (order := [layer for layer, _, _ in bounds]) not in (forward, forward + forward[::-1]):
            raise NotRepeatedError(f"layers run in the order {order}")
        for kind, those in ((FORWARD, bounds[: self.number]), (BACKWARD, bounds[self.number :])):
            if any(before[2] + 1 != after[1] for before, after in zip(those, those[1:], strict=False)):
                raise NotRepeatedError(f"something stands between two layers in the {kind}")
            if those:
                yield kind, [nodes[first : last + 1] for _, first, last in sorted(those)]

    def ways(self, kind: str, layers: Sequence[int], readers: Sequence[int]) -> Ways:
        """How each call of a layer reads its operands, the same in all `readers`, some of the `layers`, whose calls are the same.

        Raises `NotRepeatedError`.
        """
        calls = [self.calls[kind][layer] for layer in layers]
        if len({len(each) for each in calls}) > 1:
            raise NotRepeatedError("layers have unequal numbers of calls")
        found: Ways = []
        for alike in zip(*calls, strict=True):
            if len({self._description(node) for node in alike}) > 1:
                raise NotRepeatedError(f"{alike[0]} is not as the same call of another layer")
            possible = [self._possible(node) for node, layer in zip(alike, layers, strict=True) if layer in readers]
            found.append(tuple(self._common(alike[0], read) for read in zip(*possible, strict=True)))
        return found

    def _possible(self, node: Node) -> list[set[Way]]:
        """By operand what its place may be to the reader: so many layers before, or the first layer's, which all read."""
        layer = self.places[node].layer
        found: list[set[Way]] = []
        for each in operands(node):
            place = self.places.get(each)
            shared: set[Way] = {each} if place is None or place.layer == 0 else set()
            found.append(shared if place is None else shared | {place.at(place.layer - layer)})
        return found

    def _common(self, node: Node, possible: Sequence[set[Way]]) -> Way:
        found = set.intersection(*possible)
        if len(found) != 1:
            raise NotRepeatedError(f"{node} reads other operands than the same call of another layer")
        return found.pop()

    def _description(self, node: Node) -> object:
        if "ac_graph_id" in node.meta or node in SITE:
            raise NotRepeatedError(f"{node} draws, or is under a checkpoint: these are numbered")
        literals = repr(torch.fx.map_arg((node.args, node.kwargs), lambda _: "%"))
        values = tuple(
            each if each is None else (tuple(each.shape), each.stride(), each.storage_offset(), each.dtype, each.device)
            for each in results_of(node)
        )
        source = SOURCE.get(node)
        where = source and (source.file, source.line, self.run.renamed(source.module, "*"))
        return node.target, literals, values, where, EXACT.get(node)


_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


def name_steps(calls: Sequence[Sequence[Node]]) -> dict[str, int]:
    """By how much the numbers of names rise from each of these layers to the next, by the words in front of the number."""
    found: dict[str, int] = {}
    for alike in zip(*calls, strict=True):
        split = [split_name(node.name) for node in alike]
        words, steps = split[0][0], {after - before for (_, before), (_, after) in zip(split, split[1:], strict=False)}
        if {each for each, _ in split} != {words} or len(steps | {found.setdefault(words, min(steps))}) > 1:
            raise NotRepeatedError(f"the names of {', '.join(map(str, alike))} are not counted on")
    return found


def split_name(name: str) -> tuple[str, int]:
    """The words and the number of a name; 0 where it has none."""
    found = _NUMBERED.fullmatch(name)
    assert found is not None
    return found[1], int(found[2] or 0)


def counted(name: str, *steps: tuple[dict[str, int], int]) -> str:
    """The name that a call has behind so many layers more, for each of the (steps, layers) given."""
    words, number = split_name(name)
    number += sum(step.get(words, 0) * layers for step, layers in steps)
    return f"{words}_{number}" if number else words
