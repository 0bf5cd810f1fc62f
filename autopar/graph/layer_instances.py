"""Programs of models with many equal layers, from traces of a few of these, and the few layers of such a program.

    head  layer 0  layer 1  layer 2  layer 3                    tail   what is traced
    head  layer 0  layer 1  layer 2  layer 3 … layer 78  layer 79  tail   what is made of it

What a trace of all layers would give is made: names of calls are counted on, records of modules renamed, autograd's numbers as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node

from autopar.graph.layers import BACKWARD, FORWARD, SHOWN, LayerRun, Layers, NotRepeatedError, Place, Ways, counted, name_steps
from autopar.ir.keys import SOURCE
from autopar.ir.program import Form, Input, Output, Program, operands

_LAST = SHOWN - 1
# The layers that are compared, in the order in which they run; what is repeated is put in front of the last of these.
_ALIKE = {FORWARD: (1, 2, 3), BACKWARD: (2, 1)}
_REPEATED = {FORWARD: 3, BACKWARD: 2}
Item = TypeVar("Item", Input, Output)
Pair = tuple[Item, Node]


def with_all_layers(program: Program, run: LayerRun, prefix: str = "") -> Program:
    """`program`, of the first `SHOWN` layers of `run`, with all of them: FORWARD, or GLOBAL as it was traced.

    `prefix` stands before the user's paths in torch's records of modules. Raises `NotRepeatedError`.
    """
    return _Instances(program, run, prefix).made()


def with_few_layers(program: Program, run: LayerRun) -> Program:
    """The FORWARD `program`, of all layers, with the first `SHOWN` of them. Raises `NotRepeatedError` where layers are not alike."""
    layers = Layers(program, run, run.number)
    layers.ways(FORWARD, range(1, run.number), range(1, run.number))
    _refuse_unequal_tensors(program, run)
    ends = {place.at(_LAST): node for node, place in layers.places.items() if place.layer == run.number - 1}
    shown = {place: node for node, place in layers.places.items() if place.layer == _LAST}
    stands_for = {ends[place]: node for place, node in shown.items()}
    graph, mapping = Graph(), dict[Node, Node]()
    for node in program.graph.nodes:
        place = layers.places.get(node)
        if place is not None and place.layer >= SHOWN:
            continue
        for each in operands(node) if place is None or place.layer == 0 else ():
            if each in layers.places and 0 < layers.places[each].layer < run.number - 1:
                raise NotRepeatedError(f"{node} reads {each}, of a layer")
        _copy(graph, node, node.name, lambda each: mapping[stands_for.get(each, each)], mapping)
    inputs = tuple(item for item, node in program.named_inputs() if node in mapping)
    return replace(program, graph=graph, signature=replace(program.signature, inputs=inputs))


def _refuse_unequal_tensors(program: Program, run: LayerRun) -> None:
    """Results may be alike where tensors are not: one may be frozen, or longer where a mean is taken of it. The first two are shown."""
    found: dict[int, list[Input]] = {layer: [] for layer in range(2, run.number)}
    for item, _ in program.named_inputs():
        layer = run.layer_of(item.name) if item.kind in ("parameter", "buffer") else None
        if layer in found:
            found[layer].append(replace(item, name=run.renamed(item.name, "*")))
    for layer, items in found.items():
        if items != found[2]:
            raise NotRepeatedError(f"the tensors of layer {layer} are not those of layer 2: another shape or dtype, or one is frozen")


def _copy(graph: Graph, node: Node, name: str, operand: Callable[[Node], Node], mapping: dict[Node, Node]) -> Node:
    if node.op == "output":
        new = graph.output(torch.fx.map_arg(node.args[0], operand))
    else:
        new = graph.create_node(node.op, node.target, None, None, name, node.type)
        new.args, new.kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
        mapping[node] = new
    new.meta.update(node.meta)
    return new


class _Instances:
    def __init__(self, program: Program, run: LayerRun, prefix: str) -> None:
        self.program, self.run, self.prefix = program, run, prefix
        self.layers = Layers(program, run, SHOWN)
        self.places = self.layers.places
        # In a FORWARD program the second layer may read the first in ways of its own: that has more calls where it makes what all read.
        is_traced = program.form is Form.GLOBAL
        self.ways = {kind: self.layers.ways(kind, _ALIKE[kind], _ALIKE[kind] if is_traced else (2, 3)) for kind in self.layers.calls}
        self.steps = {kind: name_steps([calls[layer] for layer in _ALIKE[kind]]) for kind, calls in self.layers.calls.items()}
        self.numbers = _Numbers(self.layers) if is_traced else None
        self.graph = Graph()
        self.mapping: dict[Node, Node] = {}  # the last that was made of each
        self.made_at: dict[Place, Node] = {}
        self.names: dict[Node, str] = {}

    def made(self) -> Program:
        run, hidden = self.run, self.run.num_hidden
        self._refuse_readers()
        inputs = self._expanded(list(self.program.named_inputs()), self._placeholder)
        behind: list[tuple[dict[str, int], int]] = []  # what names are counted on by
        for node in self.program.graph.nodes:
            place = self.places.get(node)
            kind = place.kind if place is not None and node.op == "call_function" else ""
            if node.op in ("placeholder", "output"):
                continue
            if place is not None and kind and place.layer == _REPEATED[kind]:
                if place.position == 0:
                    last = run.number - 1
                    for number, layer in enumerate(range(_LAST, last + 1) if kind == FORWARD else range(last - 1, _LAST - 2, -1)):
                        self._layer(kind, layer, [*behind, (self.steps[kind], number)])
                    behind.append((self.steps[kind], hidden))
                continue
            self._once(node, place, counted(node.name, *behind))
        outputs = self._expanded(list(self.program.named_outputs()), lambda item, node, layer: (item, self._result(node, layer)))
        self.graph.output(tuple(node for _, node in outputs)).meta.update(self.program.graph.output_node().meta)
        self._name()
        signature = replace(self.program.signature, inputs=tuple(item for item, _ in inputs), outputs=tuple(item for item, _ in outputs))
        return replace(self.program, graph=self.graph, signature=signature).copy()

    def _name(self) -> None:
        if len(set(self.names.values())) < len(self.names):
            raise NotRepeatedError("two calls would have one name")
        for node, name in self.names.items():
            node.name = name

    def _refuse_readers(self) -> None:
        """What stands around the layers reads the first and the last alone; so does what is not compared."""
        for node in self.program.graph.nodes:
            place = self.places.get(node)
            if node.op != "call_function" or (allowed := self._allowed(place)) is None:
                continue
            read = [self.places[each].layer for each in operands(node) if each in self.places]
            if any(layer not in allowed for layer in read):
                raise NotRepeatedError(f"{node} reads of layers {read}")

    def _allowed(self, place: Place | None) -> tuple[int, ...] | None:
        """Which layers a call that stands there may read; None where that is compared with another layer."""
        if place is None:
            return 0, _LAST
        if place.kind == FORWARD:
            return tuple(range(place.layer + 1)) if place.layer < 2 else None
        return {0: (0, 1), _LAST: (0, _LAST - 1, _LAST)}.get(place.layer)

    def _layer(self, kind: str, layer: int, behind: Sequence[tuple[dict[str, int], int]]) -> None:
        template = _REPEATED[kind]
        ways: Ways = self.ways[kind]
        for node, reads in zip(self.layers.calls[kind][template], ways, strict=True):
            found = iter([self.mapping[way] if isinstance(way, Node) else self.made_at[way.at(layer + way.layer)] for way in reads])
            new = self._call(node, counted(node.name, *behind), lambda _, found=found: next(found))
            self._become(new, node, layer)

    def _once(self, node: Node, place: Place | None, name: str) -> None:
        """What is not repeated. In the backward the last layer is such, and reads what the forward of the layer before it made."""

        def operand(each: Node) -> Node:
            there = self.places.get(each)
            if place is not None and place.layer == _LAST and there is not None and there.layer == _LAST - 1:
                return self.made_at[there.at(self.run.number - 2)]
            return self.mapping[each]

        new = self._call(node, name, operand)
        if place is not None:
            self._become(new, node, place.layer if place.layer < _LAST else self.run.number - 1)
        elif self.numbers is not None:
            self.numbers.count(new, node, 0, self.run.num_hidden)

    def _call(self, node: Node, name: str, operand: Callable[[Node], Node]) -> Node:
        new = _copy(self.graph, node, name, operand, self.mapping)
        self.names[new] = name
        return new

    def _become(self, new: Node, node: Node, layer: int) -> None:
        """`new`, a copy of `node`, is a call of `layer`."""
        place = self.places[node]
        self.made_at[place.at(layer)] = new
        if self.numbers is not None:
            self.numbers.count(new, node, layer - place.layer, self.run.num_hidden)
        if node in SOURCE:
            SOURCE[new] = replace(SOURCE[node], module=self.run.renamed(SOURCE[node].module, layer))
        for record in ("nn_module_stack", "fwd_nn_module_stack"):
            if stack := node.meta.get(record):
                new.meta[record] = {key: (self._path(path, layer), kind) for key, (path, kind) in stack.items()}

    def _path(self, path: str, layer: int) -> str:
        return self.prefix + self.run.renamed(path.removeprefix(self.prefix), layer) if path.startswith(self.prefix) else path

    def _expanded(self, pairs: list[Pair[Item]], make: Callable[[Item, Node, int | None], Pair[Item]]) -> list[Pair[Item]]:
        """Inputs or outputs for all layers: those that are not shown stand between the third and the last, as both stand."""
        found: list[Pair[Item]] = []
        groups = _groups(pairs, self.run)
        for index, (layer, group) in enumerate(groups):
            if layer is None or layer < _LAST:
                found += [make(item, node, layer) for item, node in group]
                continue
            before = groups[index - 1]
            if before[0] != _LAST - 1 or [self._anonymous(item) for item, _ in before[1]] != [self._anonymous(item) for item, _ in group]:
                raise NotRepeatedError("the tensors of layers differ, or are in another order")
            for number in range(_LAST, self.run.number):
                is_end = number == self.run.number - 1
                for item, node in group if is_end else before[1]:
                    found.append(make(replace(item, name=self.run.renamed(item.name, number)), node, number))
        return found

    def _anonymous(self, item: Any) -> Any:
        return replace(item, name=self.run.renamed(item.name, "*"))

    def _placeholder(self, item: Input, node: Node, layer: int | None) -> tuple[Input, Node]:
        place = self.places.get(node)
        if place is None or layer in (None, place.layer):
            new = self.graph.placeholder(node.name)
        else:
            template = replace(item, name=self.run.renamed(item.name, place.layer))
            if _placeholder_of(template, Graph()).name != node.name:
                raise NotRepeatedError(f"{node} is not named after {template.name}")
            new = _placeholder_of(item, self.graph)
        new.target = self.names[new] = new.name
        new.meta.update(node.meta)
        if place is not None and layer is not None:
            self.made_at[place.at(layer)] = new
        if layer is None or place is None or layer in (place.layer, self.run.number - 1):
            self.mapping[node] = new
        return item, new

    def _result(self, node: Node, layer: int | None) -> Node:
        """What is handed out in place of `node`, for a `layer` where that is its gradient."""
        place = self.places.get(node)
        last = self.run.number - 1
        if layer is None or (place is None and layer in (0, last)):
            if place is not None and place.layer not in (0, _LAST):
                raise NotRepeatedError(f"{node}, of a layer, is handed out")
            return self.mapping[node]
        shown = layer if layer < _LAST else _LAST if layer == last else _LAST - 1
        if place is None or place.kind != BACKWARD or place.layer != shown:
            raise NotRepeatedError(f"{node}, handed out for layer {layer}, is not of its backward")
        return self.made_at[place.at(layer)]


def _placeholder_of(item: Input, graph: Graph) -> Node:
    """A placeholder that is named as capture names that of a parameter or buffer."""
    return graph.placeholder(re.sub(r"\W", "_", f"{item.kind[0]}_{item.name}"))


def _groups(pairs: list[Pair[Item]], run: LayerRun) -> list[tuple[int | None, list[Pair[Item]]]]:
    """Neighbours of one kind and one layer together."""
    found: list[tuple[int | None, list[Pair[Item]]]] = []
    before: object = None
    for item, node in pairs:
        layer = run.layer_of(item.name) if item.kind in ("parameter", "buffer", "gradient") else None
        if found and (item.kind, layer) == before:
            found[-1][1].append((item, node))
        else:
            found.append((layer, [(item, node)]))
        before = item.kind, layer
    return found


class _Numbers:
    """Autograd's numbers of calls, by which a backward call is known to be that of a forward one: each layer counts on by `step`.

    `first` is the first one of the last layer; `own` are calls that count on. Adds of gradients bear the number of some other call.
    """

    def __init__(self, layers: Layers) -> None:
        steps, self.own = set[int](), set[Node]()
        for kind, calls in layers.calls.items():
            for alike in zip(*(calls[layer] for layer in sorted(_ALIKE[kind])), strict=True):
                numbers = [node.meta.get("seq_nr") for node in alike]
                if None in numbers:
                    raise NotRepeatedError(f"{alike[0]} has no number of autograd's")
                found = {after - before for before, after in zip(numbers, numbers[1:], strict=False)}
                steps |= found - {0}
                self.own.update(alike if found != {0} else ())
        if len(steps) > 1:
            raise NotRepeatedError(f"autograd counts on by {steps}")
        self.step = steps.pop() if steps else 0  # without gradients it does not count
        self.first = min((node.meta["seq_nr"] for node in layers.calls[FORWARD][_LAST] if node in self.own), default=0)

    def count(self, new: Node, node: Node, num_layers: int, num_hidden: int) -> None:
        """Give `new`, made of `node` for a layer so many further, its number, where so many layers more stand before the last."""
        if node in self.own:
            new.meta["seq_nr"] += self.step * num_layers
        elif new.meta.get("seq_nr", -1) >= self.first:
            new.meta["seq_nr"] += self.step * num_hidden
