"""Rewrites a GLOBAL graph so that some classes of atoms have padding."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autopar._torch import FakeTensorMode, fake_mode_of, is_fake
from autopar.cost.model import is_view
from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import copy_origin
from autopar.ir.arguments import node_at
from autopar.ir.keys import DIMS, PHASE
from autopar.ir.padding import Padding
from autopar.ir.program import Input, InputKind, Output, Program, operands, results_of
from autopar.ir.sharding import Dims, ReductionKind, flat, shape_of
from autopar.ops.atom_classes import Atom, AtomClasses, atoms_of, read_by
from autopar.ops.localise import LocalBuilder
from autopar.ops.padded_ops import (
    LOOKUPS,
    SCATTERS,
    can_be_padded,
    classes_of,
    indexed_dim,
    inside,
    keeps_clean,
    mask,
    pad,
    padded_call,
    past_padding,
    unpad,
    with_atoms,
)
from autopar.ops.rules.labels import aten, value_of
from autopar.ops.strategies import Factor, Space, operand_dims

_SUMS = (aten.sum.default, aten.sum.dim_IntList)


def padded_program(program: Program, paddings: Mapping[str, Padding], classes: AtomClasses, kind: InputKind = "parameter") -> Program:
    """`program` with the inputs of `kind` in `paddings` padded, and all that walks with them where ops can take it.

    With parameters go their gradients, with batch inputs the user's outputs, and tangents with these.
    """
    return _Rewrite(program, paddings, classes, kind).program()


def covered(node: Node, classes: AtomClasses) -> tuple[set[Atom], set[Atom]]:
    """The classes of the atoms at `node` that it could split, whole, and of those that it could not."""
    space = classes.spaces.of(node)
    free, blocked = set[Atom](), set[Atom]()
    tensors = [(source, dims) for source, dims in zip(read_by(node), operand_dims(node), strict=True)]
    tensors += [((node, result), dims) for result, dims in enumerate(DIMS[node])]
    for tensor, (source, dims) in enumerate(tensors):
        places = {(factor.operands + factor.results)[tensor] for factor in space.factors}
        for position in range(len(flat(dims))):
            taken = free if position in places and can_be_padded(node, DIMS[node][0] if DIMS[node] else ()) else blocked
            taken.add(classes.find((*source, position)))
    return free - blocked, blocked


class _Rewrite:
    """Builds the padded graph node by node.

    An op whose padded atoms are all free to split runs on padded values; any other runs on logical ones. Where a value is not there in
    the form that its reader needs, it is padded or cut in front of the reader, once in each phase: what the backward reads of
    the forward stays what was saved.
    """

    def __init__(self, program: Program, paddings: Mapping[str, Padding], classes: AtomClasses, kind: InputKind) -> None:
        self.old, self.paddings, self.classes, self.kind = program, paddings, classes, kind
        self.padded_sizes: dict[Atom, int] = {}
        for item, node in program.named_inputs():
            padding = paddings.get(item.name) if item.kind == kind else None
            for position, sizes in enumerate(zip(flat(padding.before), flat(padding.after), strict=True) if padding else ()):
                if sizes[0] != sizes[1]:
                    self.padded_sizes[classes.find((node, 0, position))] = sizes[1]
        self.graph = Graph()
        self.builder = LocalBuilder(self.graph, _mode_of(program.graph))
        # What stands for a node of the old graph; then what is made of it, for readers in one phase.
        self.logical: dict[Node, Node] = {}
        self.padded: dict[Node, Node] = {}
        self.cut: dict[tuple[Node, str], Node] = {}
        self.filled: dict[tuple[Node, str], Node] = {}
        self.masked: dict[tuple[Node, int, ReductionKind, str], Node] = {}
        self.inside: dict[tuple[int, tuple[int, ...], str], Node] = {}
        # Atoms of old nodes whose padding is zero.
        self.clean: set[Atom] = set()

    def program(self) -> Program:
        inputs = tuple(self._input(item, node) for item, node in self.old.named_inputs())
        outputs: dict[Node, list[Output]] = {}
        for item, node in self.old.named_outputs():
            outputs.setdefault(node, []).append(item)
        for node in self.old.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            for item in outputs.get(node, ()):  # results are cut where they are made, so that the forward's are there before the backward
                self._result(item, node)
        results = [self._result(item, node) for item, node in self.old.named_outputs()]
        self.graph.output(tuple(node for _, node in results))
        self.graph.output_node().meta = dict(self.old.graph.output_node().meta)
        remove_dead_code(self.graph)
        signature = replace(self.old.signature, inputs=inputs, outputs=tuple(item for item, _ in results))
        return replace(self.old, graph=self.graph, signature=signature)

    def _input(self, item: Input, node: Node) -> Input:
        padding = self.paddings.get(item.name) if item.kind == self.kind else None
        if self.kind == "batch" and item.kind == "tangent":
            padding = self._padding_of(node)
        made = self.graph.node_copy(node)
        if padding is None:
            self.logical[node] = made
            return item
        with self.builder.mode:
            made.meta["val"] = torch.empty(shape_of(padding.after), dtype=item.dtype)
        self.padded[node] = made
        if item.kind != "batch":  # what stands in the padding of these is no zero
            self._is_clean(node, 0)
        return replace(item, padding=padding)

    def _result(self, item: Output, node: Node) -> tuple[Output, Node]:
        padding = None
        if item.kind == {"parameter": "gradient", "batch": "output"}[self.kind]:
            padding = self.paddings.get(item.name) if self.kind == "parameter" else self._padding_of(node)
        return (item, self._as_logical(node, node)) if padding is None else (replace(item, padding=padding), self._as_padded(node, node))

    def _call(self, node: Node) -> None:
        if self._carries(node):
            self._run_padded(node)
        else:
            self._copy(node)

    def _carries(self, node: Node) -> bool:
        """Whether `node` has padded atoms and is free to split them all."""
        sources = zip(read_by(node), operand_dims(node), strict=True)
        if not any(self._sizes(*source, dims) for source, dims in (*sources, *(((node, i), dims) for i, dims in enumerate(DIMS[node])))):
            return False
        if node.target is operator.getitem:
            return node.args[0] in self.padded
        if any(root in self.padded_sizes for root in covered(node, self.classes)[1]):
            return False
        space = self.classes.spaces.of(node)
        return all(can_be_masked(node, factor, space) for factor in space.factors if self._is_padded(node, factor))

    def _is_padded(self, node: Node, factor: Factor) -> bool:
        return any(self.classes.find(atom) in self.padded_sizes for atom in atoms_of(node, factor, read_by(node)))

    def _run_padded(self, node: Node) -> None:
        space, last = self.classes.spaces.of(node), self._last()
        read = tuple(self._operand(node, index, space) for index in range(len(space.operands)))
        padded = tuple(self._padded_dims(node, index, dims) for index, dims in enumerate(DIMS[node]))
        made = padded_call(node, padded, read, self.builder, self.old.mesh)
        self._inherit(node, last)
        self.padded[node] = made
        if padded == DIMS[node]:
            self.logical[node] = made
        sources = read_by(node)
        for result, dims in enumerate(DIMS[node]):
            for position in self._sizes(node, result, dims):
                if keeps_clean(node, space, result, position, lambda operand, place: (*sources[operand], place) in self.clean):
                    self.clean.add((node, result, position))

    def _operand(self, node: Node, index: int, space: Space) -> Node:
        """An operand of `node`, padded, with its padding masked along what `node` reduces."""
        if node.target is operator.getitem:
            return self.padded[node_at(node, 0)]
        operand, dims = operands(node)[index], operand_dims(node)[index]
        found, phase = self._as_padded(operand, node), PHASE.get(node) or "forward"
        sizes = self._sizes(operand, 0, dims)
        padding = Padding(dims, with_atoms(dims, sizes))
        for position, kind in self._passed_over(node, index, space, sizes):
            key = (found, position, kind, phase)
            if key not in self.masked:
                self.masked[key] = mask(found, self._inside(padding, position, phase), padding.after, position, kind, self.builder)
            found = self.masked[key]
        dim = indexed_dim(node)
        if dim is None or index != 1:
            return found
        table = operands(node)[0]
        rows, padded = shape_of(DIMS[table][0])[dim], shape_of(self._padded_dims(table, 0, DIMS[table][0]))[dim]
        return found if rows == padded else past_padding(found, rows, padded, self.builder)

    def _passed_over(self, node: Node, index: int, space: Space, sizes: Mapping[int, int]) -> Iterator[tuple[int, ReductionKind]]:
        """The padded atoms of an operand that are masked for `node`: with what a reduction passes over, ids with 0, a row that there is."""
        operand = operands(node)[index]
        is_ids = (node.target in LOOKUPS and index > 0) or (node.target in SCATTERS and index == 1)
        if is_ids and value_of(operand).dtype in (torch.int64, torch.int32) and not _is_given(operand):
            # The padding names some row, too, and what stands there was computed from nothing: none that there is, perhaps.
            for position in sizes:
                if (operand, 0, position) not in self.clean:
                    yield position, "sum"
        if node.target in LOOKUPS or is_ids:
            return
        for factor in space.factors:
            position = factor.operands[index]
            kinds, classes = _reducing(node, factor), classes_of(node)
            if classes is not None and operand is not classes and "logsumexp" in kinds:
                continue
            if position is None or position not in sizes or not kinds or (kinds == {"sum"} and (operand, 0, position) in self.clean):
                continue
            assert len(kinds) == 1 or operand is classes, (node.format_node(), kinds)
            yield position, "logsumexp" if operand is classes else next(iter(kinds))

    def _inside(self, padding: Padding, position: int, phase: str) -> Node:
        made = inside(padding, position, self.builder)
        key = (flat(padding.before)[position], tuple(value_of(made).shape), phase)
        return self.inside.setdefault(key, made)  # what is made for nothing is dead code

    def _copy(self, node: Node) -> None:
        """`node` on logical values. It is called anew where their strides are others now."""
        if node.target is operator.getitem:
            producer = node_at(node, 0)
            read = (self.logical[producer] if producer in self.logical else self.padded[producer],)
        else:
            read = tuple(self._as_logical(operand, node) for operand in operands(node))
        remaining = iter(read)
        if all(_layouts(old) == _layouts(new) for old, new in zip(operands(node), read, strict=True)) or node.target is operator.getitem:
            self.logical[node] = self.graph.node_copy(node, lambda _: next(remaining))
            return
        last = self._last()
        self.logical[node] = padded_call(node, DIMS[node], read, self.builder, self.old.mesh)
        self._inherit(node, last)

    def _as_logical(self, node: Node, like: Node) -> Node:
        """The value of `node` without padding, for the reader `like`."""
        if node in self.logical:
            return self.logical[node]
        key = (node, PHASE.get(like) or "forward")
        if key not in self.cut:
            last = self._last()
            self.cut[key] = unpad(self.padded[node], self._padding(node), self.builder)
            self._inherit(like, last)
        return self.cut[key]

    def _as_padded(self, node: Node, like: Node) -> Node:
        """The value of `node` with padding, for the reader `like`; itself where it has no padded atom."""
        if node in self.padded:
            return self.padded[node]
        padding = self._padding(node)
        if padding.before == padding.after:
            return self.logical[node]
        key = (node, PHASE.get(like) or "forward")
        if key not in self.filled:
            last = self._last()
            self.filled[key] = pad(self.logical[node], padding, self.builder)
            self._inherit(like, last)
            self._is_clean(node, 0)
        return self.filled[key]

    def _sizes(self, node: Node, result: int, dims: Dims) -> dict[int, int]:
        """By position the padded sizes of atoms of one result."""
        roots = {position: self.classes.find((node, result, position)) for position in range(len(flat(dims)))}
        return {position: self.padded_sizes[root] for position, root in roots.items() if root in self.padded_sizes}

    def _padded_dims(self, node: Node, result: int, dims: Dims) -> Dims:
        return with_atoms(dims, self._sizes(node, result, dims))

    def _padding_of(self, node: Node) -> Padding | None:
        """The padding of a value; None where none of its atoms is padded."""
        padding = self._padding(node)
        return None if padding.before == padding.after else padding

    def _padding(self, node: Node) -> Padding:
        return Padding(DIMS[node][0], self._padded_dims(node, 0, DIMS[node][0]))

    def _is_clean(self, node: Node, result: int) -> None:
        self.clean |= {(node, result, position) for position in self._sizes(node, result, DIMS[node][result])}

    def _last(self) -> Node | None:
        return next(iter(reversed(self.graph.nodes)), None)

    def _inherit(self, like: Node, last: Node | None) -> None:
        """What was emitted after `last` takes phase and source of `like`."""
        for emitted in reversed(self.graph.nodes):
            if emitted is last:
                return
            if emitted.op == "call_function" and PHASE.get(emitted) is None:
                copy_origin(like, emitted)


def can_be_masked(node: Node, factor: Factor, space: Space) -> bool:
    """Whether the padding of `factor` adds nothing to what `node` sums over it, once the operands that have it are zero there: the op must
    be linear in some of these, or a sum of truth values. A count of elements is neither."""
    if "sum" not in _reducing(node, factor) or classes_of(node) is not None or node.target in LOOKUPS or node.target in _SUMS:
        return True
    carriers = {operand for operand, place in enumerate(factor.operands) if place is not None}
    return any(group and group <= carriers for group in space.linear)


def _reducing(node: Node, factor: Factor) -> set[ReductionKind]:
    """How the results of `node` are reduced over `factor`; an empty one, as of fixed statistics, is not."""
    results = zip(factor.results, factor.kinds, results_of(node), strict=True) if factor.kinds else ()
    return {kind for place, kind, value in results if place is None and value is not None and value.numel()}


def _is_given(node: Node) -> bool:
    """Whether a value is an input as it is, or a view of one. The padding of a batch repeats its first sample, that of others is zero."""
    while node.op == "call_function" and is_view(node):
        node = operands(node)[0]
    return node.op == "placeholder"


def _layouts(node: Node) -> list[tuple[object, ...] | None]:
    return [None if value is None else (tuple(value.shape), tuple(value.stride())) for value in results_of(node)]


def _mode_of(graph: Graph) -> FakeTensorMode:
    return next(fake_mode_of(value) for node in graph.nodes for value in results_of(node) if value is not None and is_fake(value))
