"""The local form of an op: what one rank calls when the op runs by a strategy.

Mostly the same op on smaller operands. What changes: literal shapes become the local ones, `arange`
is offset by the rank's coordinate, and a table split over its rows looks up the ids that it has.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar._torch import FakeTensorMode, fake_mode
from autopar.graph.fake_calls import fake_call
from autopar.ir.arguments import int_at, node_at
from autopar.ir.keys import DIMS
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Dims, Sharding, Strategy
from autopar.ops.lookup import rule_of
from autopar.ops.rules.labels import argument, aten, shape_of, value_of
from autopar.ops.rules.resampling import INPUT_SIZE, RESIZING_BACKWARD
from autopar.ops.strides import to_be_contiguous


class LocalBuilder:
    """Builds a LOCAL graph; every node gets its fake value, on CPU, in the local shape."""

    def __init__(self, graph: Graph, mode: FakeTensorMode | None = None) -> None:
        self.graph = graph
        self.mode = mode or fake_mode()
        self.coordinates: dict[tuple[str, ...], Node] = {}
        self._values: dict[tuple[object, str], Any] = {}

    def placeholder(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Node:
        """An input, put after the other inputs."""
        inputs = list(self.graph.find_nodes(op="placeholder"))
        nodes = list(self.graph.nodes)
        place = self.graph.inserting_after(inputs[-1]) if inputs else self.graph.inserting_before(nodes[0] if nodes else None)
        with place:
            node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype)
        return node

    def coordinate(self, axes: tuple[str, ...]) -> Node:
        """This rank's index along `axes`, the first major: an int64 0-d input, one per tuple of axes."""
        if axes not in self.coordinates:
            name = "coordinate_" + "_".join(axis.replace(".", "_") for axis in axes)
            self.coordinates[axes] = self.placeholder(name, (), torch.int64)
        return self.coordinates[axes]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """One call; nodes among the arguments stand for their values. Equal calls (repeated layers) share one fake value."""
        node = self.graph.call_function(target, args, kwargs)
        key = target, repr(torch.fx.map_arg((args, kwargs), lambda operand: _described(operand.meta["val"])))
        if key not in self._values:
            self._values[key] = self._fake(target, args, kwargs)
        node.meta["val"] = self._values[key]
        return node

    def _fake(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        return fake_call(self.mode, target, fake_args, fake_kwargs)


def _described(value: Any) -> Any:
    """All that the values of calls depend on."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.is_conj()}{value.is_neg()}"
    return [_described(each) for each in value] if isinstance(value, (tuple, list)) else value


Localiser = Callable[[Node, Strategy, tuple[Node, ...], LocalBuilder, Mesh], Node]
_LOCALISERS: dict[object, Localiser] = {}


def localiser(*targets: object) -> Callable[[Localiser], Localiser]:
    """Register how an op, given as an overload or by its printed name, is lowered when "the same call on local operands" is not enough."""

    def register(function: Localiser) -> Localiser:
        for target in targets:
            assert target not in _LOCALISERS, f"{target} has a localiser already"
            _LOCALISERS[target] = function
        return function

    return register


def localise(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """Emit what one rank runs for `node` by `strategy`; returns the node of the local result (a tuple when `node`'s is).

    `operands` are the local operands in the order of `program.operands(node)`, each as `strategy.operands` says.
    """
    if node.target is not operator.getitem:
        operands = _laid_out(node, operands, builder)
    found = _LOCALISERS.get(node.target) or _LOCALISERS.get(str(node.target))
    rule = rule_of(node) if found is None and node.target is not operator.getitem else None
    if found is not None:
        return found(node, strategy, operands, builder, mesh)
    if rule is not None and rule.view:
        return builder.call(aten.reshape.default, operands[0], local_shape(node, strategy, mesh))
    return same_call(node, operands, builder)


def _laid_out(node: Node, operands: tuple[Node, ...], builder: LocalBuilder) -> tuple[Node, ...]:
    """The operands, contiguous where the kernel of `node` may want them so."""
    return tuple(
        builder.call(aten.clone.default, operand, memory_format=torch.contiguous_format) if wanted else operand
        for operand, wanted in zip(operands, to_be_contiguous(node, operands), strict=True)
    )


def local_shape(node: Node, strategy: Strategy, mesh: Mesh, result: int = 0) -> list[int]:
    """The shape of a result on one rank."""
    return list(strategy.results[result].local_shape(DIMS[node][result], mesh))


def same_call(node: Node, operands: tuple[Node, ...], builder: LocalBuilder, replaced: dict[int, Any] | None = None) -> Node:
    """The call of `node` on `operands`, with the arguments at the positions in `replaced` replaced."""
    remaining = iter(operands)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda _: next(remaining))
    for index, value in (replaced or {}).items():
        args = (*args[:index], value, *args[index + 1 :])
    return builder.call(node.target, *args, **kwargs)


def _with_local_shape(index: int) -> Localiser:
    """The same call with the local shape as the argument at `index`."""

    def localise_shape(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
        return same_call(node, operands, builder, {index: local_shape(node, strategy, mesh)})

    return localise_shape


localiser(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)(_with_local_shape(0))
localiser(
    aten.expand.default,
    aten.new_full.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.diagonal_backward.default,
    aten.unfold_backward.default,
)(_with_local_shape(1))


localiser(*RESIZING_BACKWARD)(_with_local_shape(INPUT_SIZE))


@localiser(aten.new_empty_strided.default)
def _new_empty_strided(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """Strides are those of a contiguous tensor, of the local shape."""
    kwargs = {name: value for name, value in node.kwargs.items() if value is not None}
    return builder.call(aten.new_empty.default, operands[0], local_shape(node, strategy, mesh), **kwargs)


@localiser(aten.native_group_norm.default)
def _group_norm(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """The literal numbers of samples, channels and groups are the local ones; the mean is [samples, groups]."""
    samples, groups = local_shape(node, strategy, mesh, result=1)
    return same_call(node, operands, builder, {3: samples, 4: shape_of(operands[0])[1], 6: groups})


@localiser(aten.native_group_norm_backward.default)
def _group_norm_backward(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    samples, groups = shape_of(operands[2])
    return same_call(node, operands, builder, {5: samples, 6: shape_of(operands[0])[1], 8: groups})


@localiser(aten.convolution.default)
def _convolution(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """The literal number of groups is the local one."""
    channels = local_shape(node, strategy, mesh)[1] if node.args[6] else shape_of(operands[0])[1]
    return same_call(node, operands, builder, {8: channels // shape_of(operands[1])[1]})


@localiser(aten.convolution_backward.default)
def _convolution_backward(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """The literal number of groups, and size of the bias, are those of the local channels."""
    output, x, weight = (shape_of(operand) for operand in operands)
    groups = (output if node.args[7] else x)[1] // weight[1]
    return same_call(node, operands, builder, {3: [output[1]] if node.args[3] else node.args[3], 9: groups})


@localiser(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """`start + step · (logical index)` for the indices that this rank holds."""
    if not strategy.results[0].axes:
        return same_call(node, operands, builder)
    dtype = value_of(node).dtype
    start = 0 if node.target is aten.arange.default else node.args[0]
    step = argument(node, 2, "step", 1) if node.target is aten.arange.start_step else 1
    index = logical_index(DIMS[node][0], strategy.results[0], 0, builder, mesh)
    index = index if dtype == torch.int64 else builder.call(aten._to_copy.default, index, dtype=dtype)
    scaled = index if step == 1 else builder.call(aten.mul.Tensor, index, step)
    return scaled if start == 0 else builder.call(aten.add.Tensor, scaled, start)


def _atoms_of(dims: Dims, sharding: Sharding, dim: int, mesh: Mesh) -> list[tuple[int, int, tuple[str, ...]]]:
    """(logical size, local size, axes) of each atom of one dim."""
    first = sum(len(atoms) for atoms in dims[:dim])
    splits = sharding.splits[first : first + len(dims[dim])]
    return [(size, size // mesh.size_of(axes), axes) for size, axes in zip(dims[dim], splits, strict=True)]


def logical_index(dims: Dims, sharding: Sharding, dim: int, builder: LocalBuilder, mesh: Mesh) -> Node:
    """Int64 [local size of `dim`]: the logical index along `dim` of each position that this rank holds."""
    atoms = _atoms_of(dims, sharding, dim, mesh)
    stride, total = math.prod(size for size, _, _ in atoms), None
    for i, (size, local, axes) in enumerate(atoms):
        stride //= size
        part = builder.call(aten.arange.default, local, dtype=torch.int64)
        if axes:
            offset = builder.call(aten.mul.Tensor, builder.coordinate(axes), local)
            part = builder.call(aten.add.Tensor, part, offset)
        part = part if stride == 1 else builder.call(aten.mul.Tensor, part, stride)
        part = builder.call(aten.reshape.default, part, [local] + [1] * (len(atoms) - 1 - i))
        total = part if total is None else builder.call(aten.add.Tensor, total, part)
    assert total is not None
    return builder.call(aten.reshape.default, total, [math.prod(local for _, local, _ in atoms)])


def local_index(ids: Node, dims: Dims, sharding: Sharding, dim: int, builder: LocalBuilder, mesh: Mesh) -> tuple[Node, Node]:
    """For logical ids along `dim`: where this rank holds them (0 where it does not), and whether it does.

    An id that no rank holds stays out of range, so that a lookup refuses it as it does where the dim is whole.
    """
    atoms = _atoms_of(dims, sharding, dim, mesh)
    stride = rows = math.prod(size for size, _, _ in atoms)
    local_stride = math.prod(local for _, local, _ in atoms)
    total: Node | None = None
    inside: Node | None = None
    for position, (size, local, axes) in enumerate(atoms):
        stride, local_stride = stride // size, local_stride // local
        digit = ids if stride == 1 else builder.call(aten.div.Tensor_mode, ids, stride, rounding_mode="floor")
        digit = builder.call(aten.remainder.Scalar, digit, size) if position else digit
        if axes:
            digit = builder.call(aten.sub.Tensor, digit, builder.call(aten.mul.Tensor, builder.coordinate(axes), local))
            within = builder.call(
                aten.bitwise_and.Tensor, builder.call(aten.ge.Scalar, digit, 0), builder.call(aten.lt.Scalar, digit, local)
            )
            inside = within if inside is None else builder.call(aten.bitwise_and.Tensor, inside, within)
        part = digit if local_stride == 1 else builder.call(aten.mul.Tensor, digit, local_stride)
        total = part if total is None else builder.call(aten.add.Tensor, total, part)
    assert total is not None and inside is not None, "called for a dim that is split"
    return builder.call(aten.where.self, inside, total, out_of_range(ids, rows, rows, builder)), inside


def out_of_range(ids: Node, rows: int, step: int, builder: LocalBuilder) -> Node:
    """0 for the ids in [0, rows), and a multiple of `step` other than 0 for those past the end, or below 0: outside of any part of `step`
    rows at most."""
    return builder.call(aten.mul.Tensor, builder.call(aten.div.Tensor_mode, ids, rows, rounding_mode="floor"), step)


def _masked(value: Node, inside: Node, builder: LocalBuilder) -> Node:
    """`value[*ids, h]` where `inside[*ids]`, else 0."""
    mask = builder.call(aten.unsqueeze.default, inside, -1)
    return builder.call(aten.where.ScalarOther, mask, value, 0)


def _is_split(dims: Dims, sharding: Sharding, dim: int, mesh: Mesh) -> bool:
    return any(axes for _, _, axes in _atoms_of(dims, sharding, dim, mesh))


@localiser(aten.embedding.default)
def _embedding(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """Rows split: look up the ids that are here, 0 for the others; the sum over ranks has every row once."""
    table = node.args[0]
    assert isinstance(table, Node)
    dims, sharding = DIMS[table][0], strategy.operands[0]
    if not _is_split(dims, sharding, 0, mesh):
        return same_call(node, operands, builder)
    ids, inside = local_index(operands[1], dims, sharding, 0, builder, mesh)
    return _masked(builder.call(aten.embedding.default, operands[0], ids), inside, builder)


@localiser(aten.embedding_dense_backward.default)
def _embedding_backward(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """Rows split: gradients of ids that are elsewhere, or of the padding, are dropped."""
    dims, sharding = DIMS[node][0], strategy.results[0]
    if not _is_split(dims, sharding, 0, mesh):
        return same_call(node, operands, builder)
    gradient, ids = operands
    rows = sharding.local_shape(dims, mesh)[0]
    here, inside = local_index(ids, dims, sharding, 0, builder, mesh)
    padding = argument(node, 3, "padding_idx", -1)
    if padding >= 0:
        inside = builder.call(aten.bitwise_and.Tensor, inside, builder.call(aten.ne.Scalar, ids, padding))
    return builder.call(aten.embedding_dense_backward.default, _masked(gradient, inside, builder), here, rows, -1, False)


@localiser(aten.gather.default)
def _gather(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """The dim that ids point into is split: look up the ids that are here, 0 for the others."""
    source, dim = node_at(node, 0), int_at(node, 1)
    assert isinstance(source, Node)
    dims, sharding, dim = DIMS[source][0], strategy.operands[0], dim % len(shape_of(source))
    if not _is_split(dims, sharding, dim, mesh):
        return same_call(node, operands, builder)
    ids, inside = local_index(operands[1], dims, sharding, dim, builder, mesh)
    return builder.call(aten.where.ScalarOther, inside, builder.call(aten.gather.default, operands[0], dim, ids), 0)


@localiser(aten.scatter_add.default)
def _scatter_add(node: Node, strategy: Strategy, operands: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """The dim that ids point into is split: values for ids that are elsewhere are dropped."""
    dims, sharding, dim = DIMS[node][0], strategy.results[0], int_at(node, 1) % max(1, len(shape_of(node)))
    if not dims or not _is_split(dims, sharding, dim, mesh):
        return same_call(node, operands, builder)
    source, ids, values = operands
    here, inside = local_index(ids, dims, sharding, dim, builder, mesh)
    return builder.call(aten.scatter_add.default, source, dim, here, builder.call(aten.where.ScalarOther, inside, values, 0))
