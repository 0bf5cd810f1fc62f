"""Programs of models with many equal layers, written out from a program with few of them.

    head  layer 0  layer 1  layer 2  layer 3  tail                    what was traced
    head  layer 0  layer 1  layer 2  layer 3 … layer 78  layer 79  tail   what is made of it

Layers 1, 2 and 3 have to be alike, call by call: the op, its literals, its value, the line of code, and for each operand which call of the
same layer or of the one before it makes it, or which value that all layers read. Names of calls are counted on as a trace counts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.ir.keys import EXACT, SOURCE
from autopar.ir.program import Input, Program, operands

# As many layers are traced: of the first and the last neighbours differ, and two between them can be compared.
SHOWN = 4
_FIRST, _LAST = 0, SHOWN - 1
_ALIKE = (1, 2, 3)
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


class NotRepeatedError(Exception):
    """Layers are not alike; the text says where."""


@dataclass(frozen=True)
class LayerRun:
    """The layers of an `nn.ModuleList`: `number` of them under `path`, "model.layers"."""

    path: str
    number: int

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


@dataclass(frozen=True)
class _Place:
    """A node of a layer: which, among the calls of the layer (`kind` "") or its parameters and buffers (`kind` is the name)."""

    kind: str
    layer: int
    position: int

    def at(self, layer: int) -> _Place:
        return replace(self, layer=layer)


# How a call reads an operand: one that all layers read, or a place, its layer counted from the reader's.
_Way = Node | _Place


def with_all_layers(program: Program, run: LayerRun, prefix: str = "") -> Program:
    """The FORWARD `program`, which has the first `SHOWN` layers of `run`, with all of them.

    `prefix` is what stands before the user's paths in torch's records of modules. Raises `NotRepeatedError`.
    """
    return _Instances(program, run, prefix).made()


@dataclass
class _Instances:
    program: Program
    run: LayerRun
    prefix: str
    places: dict[Node, _Place] = field(default_factory=dict)
    graph: Graph = field(default_factory=Graph)
    mapping: dict[Node, Node] = field(default_factory=dict)  # of what is there once
    made_at: dict[_Place, Node] = field(default_factory=dict)

    def made(self) -> Program:
        calls = self._placed()
        ways = self._ways(calls)
        steps = self._name_steps(calls)
        self._refuse_readers()
        last, hidden = self.run.number - 1, self.run.number - SHOWN
        names = dict[Node, str]()
        inputs = list(self._inputs(names))
        is_behind = False
        for node in self.program.graph.nodes:
            place = self.places.get(node)
            if node.op == "placeholder":
                continue
            if place is not None and place.layer == _LAST:
                if place.position == 0:
                    for number in range(hidden):
                        self._layer(calls[_LAST], ways, _LAST + number, lambda name, number=number: _counted(name, steps, number), names)
                    self._layer(calls[_LAST], ways, last, lambda name: _counted(name, steps, hidden), names)
                    is_behind = True
                continue
            if node.op == "output":
                new = self.graph.output(torch.fx.map_arg(node.args[0], self._one))
                new.meta.update(node.meta)
                continue
            new = self._call(node, self._one, names, _counted(node.name, steps, hidden if is_behind else 0))
            if place is not None:
                self.made_at[place] = new
        if len(set(names.values())) < len(names):
            raise NotRepeatedError("two calls would have one name")
        for node, name in names.items():
            node.name = name
        signature = replace(self.program.signature, inputs=tuple(inputs))
        return replace(self.program, graph=self.graph, signature=signature).copy()

    def _one(self, node: Node) -> Node:
        return self.mapping[node]

    def _placed(self) -> tuple[list[Node], ...]:
        """The calls of each layer, in order; they and the tensors of layers have `places` then."""
        for item, node in self.program.named_inputs():
            layer = self.run.layer_of(item.name) if item.kind in ("parameter", "buffer") else None
            if layer is not None:
                self.places[node] = _Place(f"{item.kind} {self.run.renamed(item.name, '*')}", layer, 0)
        nodes = [node for node in self.program.graph.nodes if node.op == "call_function"]
        layers = [self.run.layer_of(SOURCE[node].module) if node in SOURCE else None for node in nodes]
        found: list[list[Node]] = []
        end = 0
        for layer in range(SHOWN):
            own = [index for index, each in enumerate(layers) if each == layer]
            if not own or (layer and own[0] != end) or any(each not in (layer, None) for each in layers[own[0] : own[-1] + 1]):
                raise NotRepeatedError(f"the calls of layer {layer} do not follow those of the layer before it")
            end = own[-1] + 1
            found.append(nodes[own[0] : end])
            self.places |= {node: _Place("", layer, position) for position, node in enumerate(found[-1])}
        if any(each is not None and each >= SHOWN for each in layers):
            raise NotRepeatedError("there are more layers than were to be shown")
        return tuple(found)

    def _ways(self, calls: tuple[list[Node], ...]) -> list[tuple[_Way, ...]]:
        """How each call of a layer reads its operands, the same in all layers that are compared."""
        if len({len(calls[layer]) for layer in _ALIKE}) > 1:
            raise NotRepeatedError("layers have unequal numbers of calls")
        found: list[tuple[_Way, ...]] = []
        for alike in zip(*(calls[layer] for layer in _ALIKE), strict=True):
            if len({self._description(node) for node in alike}) > 1:
                raise NotRepeatedError(f"{alike[0]} and {alike[-1]} differ")
            ways = [self._common(read) for read in zip(*(self._possible(node) for node in alike), strict=True)]
            found.append(tuple(ways))
        return found

    def _possible(self, node: Node) -> list[set[_Way]]:
        """By operand what its place may be to the reader: that of the layer before, or the first layer's, which all read."""
        layer = self.places[node].layer
        found: list[set[_Way]] = []
        for each in operands(node):
            place = self.places.get(each)
            shared: set[_Way] = {each} if place is None or place.layer == _FIRST else set()
            found.append(shared if place is None else shared | {place.at(place.layer - layer)})
        return found

    def _common(self, possible: tuple[set[_Way], ...]) -> _Way:
        found = set.intersection(*possible)
        if len(found) != 1:
            raise NotRepeatedError(f"layers read {possible[0]} and {possible[-1]}")
        return found.pop()

    def _description(self, node: Node) -> object:
        literals = repr(torch.fx.map_arg((node.args, node.kwargs), lambda _: "%"))
        value, source = node.meta.get("val"), SOURCE.get(node)
        if not isinstance(value, torch.Tensor):
            value_is: object = repr(value)
        else:
            value_is = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad)
        where = source and (source.file, source.line, self.run.renamed(source.module, "*"))
        region = node.meta.get("ac_graph_id")
        if region is not None:
            raise NotRepeatedError("regions under a checkpoint are numbered")
        return node.target, literals, value_is, where, EXACT.get(node)

    def _name_steps(self, calls: tuple[list[Node], ...]) -> dict[str, int]:
        """By how much the numbers of names rise from layer to layer, by what is in front of the number."""
        found: dict[str, int] = {}
        for alike in zip(*(calls[layer] for layer in _ALIKE), strict=True):
            (words, first), (_, second), (_, third) = pairs = [_split(node.name) for node in alike]
            if len({each for each, _ in pairs}) > 1 or third - second != second - first or found.setdefault(words, second - first) != second - first:
                raise NotRepeatedError(f"{alike[0]}, {alike[1]} and {alike[2]} are not numbered on")
        return found

    def _refuse_readers(self) -> None:
        """Only the next layer reads what a layer makes, but for the first and the last; only it has its tensors."""
        for node in self.program.graph.nodes:
            for each in operands(node) if node not in self.places else ():
                if each in self.places and _FIRST < self.places[each].layer < _LAST:
                    raise NotRepeatedError(f"{node} reads {each}, of a layer")
        if any(item.kind == "buffer" and self.run.layer_of(item.name) is not None for item in self.program.signature.outputs):
            raise NotRepeatedError("layers write buffers")

    def _inputs(self, names: dict[Node, str]) -> Iterator[Input]:
        """Placeholders and the inputs that they are: those of layers that were not shown stand in front of the last one's."""
        pairs = list(self.program.named_inputs())
        kept: list[tuple[Input, Node]] = []
        for index, (item, node) in enumerate(pairs):
            place = self.places.get(node)
            if place is None or place.layer != _LAST:
                yield self._input(item, node, item.name, place, names)
                continue
            kept.append((item, node))
            following = pairs[index + 1] if index + 1 < len(pairs) else None
            if following is not None and (there := self.places.get(following[1])) and there.layer == _LAST and following[0].kind == item.kind:
                continue
            for layer in range(_LAST, self.run.number):
                for each, template in kept:
                    yield self._input(each, template, self.run.renamed(each.name, layer), self.places[template].at(layer), names)
            kept.clear()

    def _input(self, item: Input, node: Node, name: str, place: _Place | None, names: dict[Node, str]) -> Input:
        before, after = (re.sub(r"\W", "_", each) for each in (item.name, name))
        if name != item.name and before not in node.name:
            raise NotRepeatedError(f"{node} is not named after {item.name}")
        called = node.name.replace(before, after)
        new = self.graph.placeholder(called)
        new.target = called
        new.meta.update(node.meta)
        names[new] = called
        if place is not None:
            self.made_at[place] = new
        if place is None or place.layer == (self.run.number - 1 if self.places[node].layer == _LAST else place.layer):
            self.mapping[node] = new
        return replace(item, name=name)

    def _layer(self, calls: list[Node], ways: list[tuple[_Way, ...]], layer: int, name: Callable[[str], str], names: dict[Node, str]) -> None:
        for node, reads in zip(calls, ways, strict=True):
            found = iter([self.mapping[way] if isinstance(way, Node) else self.made_at[way.at(layer + way.layer)] for way in reads])
            new = self._call(node, lambda _, found=found: next(found), names, name(node.name))
            self.made_at[self.places[node].at(layer)] = new
            if node in SOURCE:
                SOURCE[new] = replace(SOURCE[node], module=self.run.renamed(SOURCE[node].module, layer))
            stack = node.meta.get("nn_module_stack")
            if stack:
                new.meta["nn_module_stack"] = {key: (self._path(path, layer), kind) for key, (path, kind) in stack.items()}

    def _path(self, path: str, layer: int) -> str:
        return self.prefix + self.run.renamed(path.removeprefix(self.prefix), layer) if path.startswith(self.prefix) else path

    def _call(self, node: Node, operand: Callable[[Node], Node], names: dict[Node, str], name: str) -> Node:
        new = self.graph.create_node(node.op, node.target, None, None, name, node.type)
        new.args, new.kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
        new.meta.update(node.meta)
        self.mapping[node], names[new] = new, name
        return new


def _split(name: str) -> tuple[str, int]:
    """The words and the number of a name; 0 where it has none."""
    found = _NUMBERED.fullmatch(name)
    assert found is not None
    return found[1], int(found[2] or 0)


def _counted(name: str, steps: dict[str, int], layers: int) -> str:
    """The name that a call has behind so many layers more."""
    words, number = _split(name)
    number += steps.get(words, 0) * layers
    return f"{words}_{number}" if number else words


