"""From GLOBAL to LOCAL: the program that every rank runs, in local shapes, with collectives as nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from autopar.graph.emit import copy_origin
from autopar.ir.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, reshard, wait
from autopar.ir.keys import COPY, DIMS, ORIGIN, SHARDING, STRATEGY
from autopar.ir.markers import MARKERS
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Program, operands
from autopar.ir.reshard import ReshardStep, steps
from autopar.ir.sharding import Dims, flat
from autopar.ops.localise import LocalBuilder, localise
from autopar.pipeline.stage_rules import makes_copies

aten = torch.ops.aten


@dataclass(frozen=True)
class Lower:
    """Write each op on local operands, each reshard as slices and collectives, each launch followed by its wait.

    Rank coordinates become inputs, so one program serves all ranks.
    Reads: DIMS, SHARDING, STRATEGY, PHASE. Writes: ORIGIN (the GLOBAL node a value is a part of), DIMS and SHARDING of
    that value; COPY where `held` nodes were. Ensures: form LOCAL; every value's shape is its sharding's local shape.
    """

    name: str = "lower"

    def apply(self, program: Program) -> Program:
        lowering = _Lowering(program)
        for item, node in program.named_inputs():
            lowering.placeholder(item, node)
        for node in program.graph.nodes:
            if node.op == "call_function":
                lowering.call(node)
        return lowering.finish()


class _Lowering:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = Graph()
        self.builder = LocalBuilder(self.graph)
        self.local: dict[Node, Node] = {}
        self.copies = makes_copies(program)

    def placeholder(self, item: Input, node: Node) -> None:
        shape = SHARDING[node][0].local_shape(DIMS[node][0], self.program.mesh)
        local = self.builder.placeholder(node.name, shape, item.dtype)
        self.record(node, local)

    def call(self, node: Node) -> None:
        before = self.last()
        arguments = tuple(self.local[operand] for operand in operands(node))
        if node.target is reshard:
            local = self.reshard(node, arguments[0])
        elif node.target in MARKERS:
            local = arguments[0]
        else:
            local = localise(node, STRATEGY[node], arguments, self.builder, self.program.mesh)
        self.inherit(node, before)
        self.record(node, local)

    def reshard(self, node: Node, local: Node) -> Node:
        source = operands(node)[0]
        dims = DIMS[source][0]
        for step in steps(dims, SHARDING[source][0], SHARDING[node][0], self.program.mesh):
            local = emit_step(self.builder, local, dims, step, self.program.mesh)
        return local

    def last(self) -> Node | None:
        nodes = self.graph.nodes
        return next(iter(reversed(nodes)), None)

    def inherit(self, node: Node, before: Node | None) -> None:
        """Every local node of `node` takes its phase and source."""
        for emitted in reversed(self.graph.nodes):
            if emitted is before:
                return
            if emitted.op == "call_function":
                copy_origin(node, emitted)
                if node in self.copies:
                    COPY[emitted] = True

    def record(self, node: Node, local: Node) -> None:
        self.local[node] = local
        if local not in ORIGIN:
            ORIGIN[local], DIMS[local], SHARDING[local] = node.name, DIMS[node], SHARDING[node]

    def finish(self) -> Program:
        self.graph.output(tuple(self.local[node] for node in self.program.results))
        coordinates = tuple(
            Input("coordinate", ",".join(axes), (), torch.int64, dims=(), sharding=None) for axes in self.builder.coordinates
        )
        signature = replace(self.program.signature, inputs=self.program.signature.inputs + coordinates)
        local = replace(self.program, graph=self.graph, signature=signature, form=Form.LOCAL)
        self.graph.lint()
        return local


def emit_step(builder: LocalBuilder, x: Node, dims: Dims, step: ReshardStep, mesh: Mesh) -> Node:
    """Write one reshard step on the local part `x`: the collective works on a leading dim of group size."""
    atoms = list(flat(step.before.local_dims(dims, mesh)))
    result = list(step.after.local_shape(dims, mesh))
    size = mesh.size_of(step.axes)
    if step.collective == "all_reduce":
        return _complete(builder, all_reduce, _contiguous(builder, x), step.axes, step.kind)
    if step.kind == "logsumexp":
        return builder.call(aten.logsumexp.default, _complete(builder, all_gather, _contiguous(builder, x), step.axes, size), [0])
    if step.collective == "slice":
        assert step.split is not None
        parts = builder.call(aten.reshape.default, x, _broken(atoms, step.split, size))
        mine = builder.call(
            aten.index_select.default, parts, step.split, builder.call(aten.reshape.default, builder.coordinate(step.axes), [1])
        )
        return builder.call(aten.reshape.default, mine, result)
    if step.split is not None:
        x = _reshaped(builder, x, _broken(atoms, step.split, size))
        x = _contiguous(builder, builder.call(aten.permute.default, x, _to_front(len(atoms) + 1, step.split)))
        atoms[step.split] //= size
        if step.collective == "reduce_scatter":
            x = _complete(builder, reduce_scatter, x, step.axes, step.kind)
        else:
            x = _complete(builder, all_to_all, x, step.axes)
    else:
        x = _contiguous(builder, x)
        # A part of a parameter is gathered as it lies and reshaped behind that, in its reader's fragment: before the gather it would take a
        # fragment of its own. What is computed is reshaped where it is computed; pieces of rows (`chunk_sites`) are looked for dim by dim.
        x = x if x.op == "placeholder" else _reshaped(builder, x, atoms)
        x = _complete(builder, all_gather, x, step.axes, size)
    if step.gathered:  # the first lies in front already
        x = _reshaped(builder, x, [size, *atoms])
        x = builder.call(aten.permute.default, x, _from_front(len(atoms) + 1, step.gathered))
    return _reshaped(builder, x, result)


def _complete(builder: LocalBuilder, launch: object, x: Node, *arguments: object) -> Node:
    return builder.call(wait, builder.call(launch, x, *arguments))


def _reshaped(builder: LocalBuilder, x: Node, shape: Sequence[int]) -> Node:
    return x if tuple(x.meta["val"].shape) == tuple(shape) else builder.call(aten.reshape.default, x, list(shape))


def _contiguous(builder: LocalBuilder, x: Node) -> Node:
    return x if x.meta["val"].is_contiguous() else builder.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _broken(atoms: Sequence[int], atom: int, size: int) -> list[int]:
    return [*atoms[:atom], size, atoms[atom] // size, *atoms[atom + 1 :]]


def _to_front(rank: int, dim: int) -> list[int]:
    return [dim, *(other for other in range(rank) if other != dim)]


def _from_front(rank: int, dim: int) -> list[int]:
    return [*range(1, dim + 1), 0, *range(dim + 1, rank)]
