"""A program: one graph, what its inputs and outputs mean, and the form it is in.

FORWARD  the captured forward pass and loss; composite ops are still single nodes
GLOBAL   forward and backward in functional ATen, logical shapes: one program for all ranks. What is decided about ranks (shardings,
         reshards, stages) stands on its nodes
LOCAL    the program of one rank: local shapes, collectives as nodes, rank coordinates as inputs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.errors import AutoparError
from autopar.ir.actions import SINGLE, PipelineSchedule
from autopar.ir.arguments import arguments
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import Mesh
from autopar.ir.padding import Padding
from autopar.ir.precision import MixedPrecision
from autopar.ir.sharding import Dims, Sharding

InputKind = Literal["parameter", "buffer", "batch", "constant", "random_key", "tangent", "coordinate"]
OutputKind = Literal["loss", "output", "gradient", "buffer", "check"]


class Form(Enum):
    FORWARD = "FORWARD"
    GLOBAL = "GLOBAL"
    LOCAL = "LOCAL"


@dataclass(frozen=True)
class Input:
    """One placeholder of the graph, in order.

    `name` is the original parameter or buffer name, the flat index of a batch input ("0", "1", …),
    the index of the output a tangent belongs to, or the axes a coordinate counts along ("tp", "tp.0,tp.1").
    `shape` is the logical shape in every form; a parameter, batch input or tangent with `padding` enters the graph with it.
    A tied parameter is one input under its first name.
    `batch_dim` is the dim of a batch input, or of a tangent of which ranks have unequal shares, that counts samples; None for one that
    every rank gets whole. `shares` says how many of them each place along dp passes, where real ranks pass unequal ones; for a tangent see
    `Output`. A buffer that `is_parameter` is a parameter that does not train and that forward writes. `asked` is the line
    where forward asks how a batch input lies in memory, if it does.
    """

    kind: InputKind
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    dims: Dims = ()
    sharding: Sharding | None = None
    batch_dim: int | None = None
    padding: Padding | None = None
    shares: tuple[int, ...] = ()
    views: int = 1
    is_parameter: bool = False
    asked: str = ""

    def entering(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, whole and of the logical shape, with the padding that it enters the graph with."""
        if self.padding is None:
            return value
        return self.padding.repeat_first(value) if self.kind == "batch" else self.padding.pad(value)


@dataclass(frozen=True)
class Output:
    """One result of the graph, in order: the loss, a tensor of the user's output, a gradient, a buffer's new value, or a check:
    how many values violate what the model asserts (`Signature.checks`).

    `name` is a gradient's parameter, a buffer's name, or the flat index in the user's output structure. A gradient has its
    parameter's `padding`, and comes back `through` the outputs of these flat indices; through all where none is named. Of an output
    that `is_detached` the model would let gradients come back, and this program does not.
    `batch_dim` is the dim of the user's output that counts samples, None where that is not known; one that `is_whole` is known to have
    none, and every rank gets all of it. `shares` say how many samples along `batch_dim` each place along dp gets, where real ranks pass
    unequal shares of the batch: of each of its `views`, all samples one way and then all another (`cat([h, g])`).
    Where it `is_once`, a buffer is written once a step: all microbatches find the old value, and have the same new one.
    """

    kind: OutputKind
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    dims: Dims = ()
    sharding: Sharding | None = None
    padding: Padding | None = None
    through: tuple[str, ...] = ()
    is_detached: bool = False
    batch_dim: int | None = None
    is_whole: bool = False
    shares: tuple[int, ...] = ()
    views: int = 1
    is_once: bool = False


@dataclass(frozen=True)
class Signature:
    """What the placeholders and results of a graph mean. `structure` is the pytree spec of the user's output;
    `leaves` its flat leaves (`compiled.TENSOR` where a tensor stands). `checks` are what the model asserts of values, by number,
    each a text with its line. `guessed`: the names of the call's leaves by flat index, where nobody said which of their dims counts
    samples, so that dim 0 was taken; none where the user did."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    structure: Any = None
    leaves: tuple[Any, ...] = ()
    checks: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()

    @property
    def written_parameters(self) -> tuple[Input, ...]:
        """The buffers that are parameters: none trains, and forward writes them."""
        return tuple(item for item in self.inputs if item.is_parameter)

    def inputs_of(self, kind: InputKind) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if item.kind == kind)

    def outputs_of(self, kind: OutputKind) -> tuple[Output, ...]:
        return tuple(item for item in self.outputs if item.kind == kind)

    def parameter(self, name: str) -> Input:
        for item in self.inputs:
            if item.kind == "parameter" and item.name == name:
                return item
        raise KeyError(name)


@dataclass(frozen=True)
class Program:
    """A graph with its meaning. Passes never change a program they were given: they `copy` and rewrite the copy.

    `logical_share`: of the FLOPs of the graph's contractions those that are the model's; the rest is padding.
    `written`: the attributes of modules that forward sets, by path; the program has what they were before.
    `autocast`: the type of device of the `torch.autocast` whose casts the program has as nodes, if it has any: "cpu" or "cuda".
    `precision`: by which the program was cast; `reduce`: what gradients are summed over ranks in, where the program has casts of either.
    `order`: which stage of a pipeline runs which microbatch when; one of each unless more was asked for.
    """

    graph: Graph
    mesh: Mesh
    signature: Signature
    form: Form
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    freedom: Freedom = Freedom()
    logical_share: float = 1.0
    written: tuple[str, ...] = ()
    order: PipelineSchedule = SINGLE
    autocast: str | None = None
    precision: MixedPrecision | None = None
    reduce: torch.dtype | None = None

    def copy(self, **changes: Any) -> Program:
        return replace(self, graph=_copied(self.graph), **changes)

    @property
    def placeholders(self) -> tuple[Node, ...]:
        return tuple(node for node in self.graph.nodes if node.op == "placeholder")

    @property
    def results(self) -> tuple[Node, ...]:
        """The nodes that the outputs of the signature stand for, in order."""
        return tuple(arguments(self.graph.output_node())[0])

    def named_inputs(self) -> Iterator[tuple[Input, Node]]:
        yield from zip(self.signature.inputs, self.placeholders, strict=True)

    def named_outputs(self) -> Iterator[tuple[Output, Node]]:
        yield from zip(self.signature.outputs, self.results, strict=True)

    def module(self) -> GraphModule:
        """The graph as a callable that takes the placeholders in order and returns the results as a tuple."""
        return GraphModule(torch.nn.Module(), self.graph)

    @property
    def needs_scale(self) -> bool:
        """Whether gradients are in float16 somewhere, by `precision` or an autocast: of a loss that is not scaled they vanish."""
        if self.precision is not None:
            return self.precision.needs_scale
        values = (node.meta.get("val") for node in self.graph.nodes if self.autocast is not None)
        return any(isinstance(value, torch.Tensor) and value.dtype is torch.float16 for value in values)

    @property
    def num_nodes(self) -> int:
        return sum(1 for node in self.graph.nodes if node.op == "call_function")

    def is_copy_of(self, other: Program) -> bool:
        """Whether nothing tells this program from `other`: calls, names, literals, keys, signature and mesh are the same.

        A key that was written anew counts as a change, be its value equal to the one before.
        """
        constants = {name: id(tensor) for name, tensor in self.constants.items()}
        same = constants == {name: id(tensor) for name, tensor in other.constants.items()}
        nodes, others = self.graph.nodes, other.graph.nodes
        same = same and len(nodes) == len(others) and replace(self, graph=other.graph, constants=other.constants) == other
        return same and all(_are_equal(node, before) for node, before in zip(nodes, others, strict=True))

    def node(self, name: str) -> Node:
        for node in self.graph.nodes:
            if node.name == name:
                return node
        raise AutoparError(f"no node named {name!r} in this {self.form.value} program")


def _copied(graph: Graph) -> Graph:
    """A copy of `graph`, names and what stands on its nodes included.

    As `Graph.graph_copy`, in less than half of the time: arguments are given once a node is there, since those that a node is made with are
    searched for symbols, and what stands on a node is written into what it has.
    """
    found = Graph()
    mapping: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            new = found.output(torch.fx.map_arg(node.args[0], mapping.__getitem__))
        else:
            mapping[node] = new = found.create_node(node.op, node.target, None, None, node.name, node.type)
            if node.args:
                new.args = torch.fx.map_arg(node.args, mapping.__getitem__)
            if node.kwargs:
                new.kwargs = torch.fx.map_arg(node.kwargs, mapping.__getitem__)
        new.meta.update(node.meta)
    for node, new in mapping.items():
        if new.name != node.name:
            new.name = node.name
    return found


def _are_equal(node: Node, other: Node) -> bool:
    """Whether two nodes, of one graph and a copy of it, are alike. Literals are compared as they print: 0.0 == -0.0 == 0 == False."""
    here, there = ((each.op, each.name, each.target, repr(each.args), repr(each.kwargs)) for each in (node, other))
    keys = node.meta.keys() == other.meta.keys() and all(value is other.meta[key] for key, value in node.meta.items())
    return keys and here == there


def operands(node: Node) -> tuple[Node, ...]:
    """The tensor operands of `node` in the order of its arguments, repeats kept: `mul(x, x)` has two."""
    found: list[Node] = []

    def visit(value: Node) -> Node:
        found.append(value)
        return value

    torch.fx.map_arg((node.args, node.kwargs), visit)
    return tuple(found)


def results_of(node: Node) -> tuple[torch.Tensor | None, ...]:
    """The (fake) values of a node, one per result; None where a result is no tensor."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(item if isinstance(item, torch.Tensor) else None for item in value)
    return (value if isinstance(value, torch.Tensor) else None,)
