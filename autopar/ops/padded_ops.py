"""How each op runs on padded operands, and how values are padded and cut to size again, as nodes of a GLOBAL graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.ir.arguments import arguments, float_at, int_at, node_at
from autopar.ir.keys import DIMS
from autopar.ir.markers import MARKERS
from autopar.ir.mesh import Mesh
from autopar.ir.padding import Padding
from autopar.ir.program import operands, results_of
from autopar.ir.sharding import Dims, ReductionKind, Sharding, Strategy, flat, shape_of
from autopar.ops.localise import LocalBuilder, localise, out_of_range, same_call
from autopar.ops.lookup import rule_of
from autopar.ops.rules.labels import aten, value_of
from autopar.ops.rules.ours import traits_of
from autopar.ops.strategies import Space, operand_dims

# Ops that look rows up by id: no id names a row of the padding.
LOOKUPS = frozenset({aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default})
# Ops that write rows by the ids that are their second operand.
SCATTERS = frozenset({aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two})
# Ops whose result is zero where their operands are, beside those that are linear.
_KEEP_ZERO = frozenset(
    {aten.gelu.default, aten.relu.default, aten.silu.default, aten.tanh.default, aten.sin.default, aten.abs.default, aten.sqrt.default}
)
# Ops that are linear in one operand and make something finite of zeros in the others; a quotient does not.
_FINITE = frozenset(
    {
        aten.mul.Tensor,
        aten.mm.default,
        aten.bmm.default,
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.gelu_backward.default,
        aten.silu_backward.default,
        aten.tanh_backward.default,
        aten.threshold_backward.default,
    }
)
_ARANGES: dict[object, int] = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}


@dataclass(frozen=True)
class PaddedSharding(Sharding):
    """A value on one rank whose local atoms are `padded`: larger than the logical ones, where a rank's part of a split has smaller ones."""

    padded: Dims = ()

    def local_dims(self, dims: Dims, mesh: Mesh) -> Dims:
        return self.padded


def classes_of(node: Node) -> Node | None:
    """The operand that tells `node` which of its columns are padding, so that it passes over them by itself; if there is one."""
    traits = traits_of(node)
    classes = traits.classes if traits is not None else None
    return arguments(node)[classes.numbers] if classes is not None and classes.skips_padding else None


def can_be_padded(node: Node, dims: Dims) -> bool:
    """Whether a node that makes a range, with atoms `dims`, or reads one, still does with one atom padded: padding stands at the end."""
    traits = traits_of(node)
    if traits is not None and traits.classes is not None:  # whether it passes over padding or not, it looks labels up in a range
        numbers = arguments(node)[traits.classes.numbers]
        if len(DIMS[numbers][0][0]) != 1:
            return False
    return node.target not in _ARANGES or len(dims[0]) == 1


def padded_call(node: Node, padded: tuple[Dims, ...], read: tuple[Node, ...], builder: LocalBuilder, mesh: Mesh) -> Node:
    """The call of `node` on the padded operands `read`; its results have the atoms `padded`.

    An op that runs on parts of its operands runs on more than them, too: literal shapes are written anew as for a rank's part.
    """
    if node.target in MARKERS:
        made = builder.call(node.target, read[0])
    elif node.target in _ARANGES:
        made = _range(node, shape_of(padded[0])[0], builder)
    elif node.target is aten.embedding_dense_backward.default:
        made = same_call(node, read, builder, {2: shape_of(padded[0])[0]})
    else:
        whole = tuple(Sharding.replicated(dims) for dims in operand_dims(node))
        strategy = Strategy(whole, tuple(PaddedSharding(Sharding.replicated(dims).splits, padded=dims) for dims in padded))
        made = localise(node, strategy, read, builder, mesh)
    for value, dims in zip(results_of(made), padded, strict=True):
        assert value is None or tuple(value.shape) == shape_of(dims), f"{node.format_node()}, padded to {dims}: {tuple(value.shape)}"
    return made


def _range(node: Node, size: int, builder: LocalBuilder) -> Node:
    """`size` numbers that go on from those of `node`."""
    place = _ARANGES[node.target]
    args = list(arguments(node))
    step = args[2] if len(args) > 2 else 1
    args[place] = (args[0] if place else 0) + size * step
    return builder.call(node.target, *args, **node.kwargs)


def pad(value: Node, padding: Padding, builder: LocalBuilder) -> Node:
    """Zeros appended along the atoms that grow."""
    dims = padding.before
    for position, (before, after) in enumerate(zip(flat(padding.before), flat(padding.after), strict=True)):
        if before != after:
            shape, place = _opened(dims, position)
            pads = [0, 0] * (len(shape) - 1 - place) + [0, after - before]
            value = builder.call(aten.constant_pad_nd.default, _viewed(value, shape, builder), pads)
            dims = with_atoms(dims, {position: after})
            value = _viewed(value, list(shape_of(dims)), builder)
    return value


def unpad(value: Node, padding: Padding, builder: LocalBuilder) -> Node:
    """The elements in front of the padding."""
    dims = padding.after
    for position, (before, after) in enumerate(zip(flat(padding.before), flat(padding.after), strict=True)):
        if before != after:
            shape, place = _opened(dims, position)
            value = builder.call(aten.slice.Tensor, _viewed(value, shape, builder), place, 0, before)
            dims = with_atoms(dims, {position: before})
            value = _viewed(value, list(shape_of(dims)), builder)
    return value


def indexed_dim(node: Node) -> int | None:
    """The dim of the first operand in which the second one's ids name rows, where `node` reads or writes rows that may be padded."""
    if node.target is aten.embedding.default:
        return 0
    if node.target is aten.gather.default or node.target in SCATTERS:
        return int_at(node, 1) % max(1, len(shape_of(DIMS[node_at(node, 0)][0])))
    return None


def past_padding(ids: Node, rows: int, padded: int, builder: LocalBuilder) -> Node:
    """`ids` of a table of `rows` rows, now `padded`: an id that is past its end is past the padding, too, so that it is refused."""
    return builder.call(aten.add.Tensor, ids, out_of_range(ids, rows, padded, builder))


def inside(padding: Padding, position: int, builder: LocalBuilder) -> Node:
    """Bool: which indices of the atom at `position` are elements; of a shape that broadcasts with a value whose dim is opened at it."""
    shape, place = _opened(padding.after, position)
    index = builder.call(aten.arange.default, shape[place], dtype=torch.int64)
    found = builder.call(aten.lt.Scalar, index, flat(padding.before)[position])
    return _viewed(found, [shape[place]] + [1] * (len(shape) - 1 - place), builder)


def mask(value: Node, elements: Node, dims: Dims, position: int, kind: ReductionKind, builder: LocalBuilder) -> Node:
    """`value`, of padded `dims`, with what a reduction of `kind` passes over in the padding of the atom at `position`.

    `elements` is `inside` of that atom.
    """
    shape, _ = _opened(dims, position)
    masked = builder.call(aten.where.ScalarOther, elements, _viewed(value, shape, builder), _neutral(value_of(value).dtype, kind))
    return _viewed(masked, list(shape_of(dims)), builder)


def _neutral(dtype: torch.dtype, kind: ReductionKind) -> float:
    if dtype == torch.bool:
        return False
    if kind == "sum":
        return 0
    # A logsumexp passes over what a maximum passes over.
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _opened(dims: Dims, position: int) -> tuple[list[int], int]:
    """The shape in which the dim of the atom at `position` is broken into its atoms, and where the atom then is."""
    shape, place = list[int](), 0
    for dim in dims:
        if 0 <= position < len(dim):
            place = len(shape) + position
            shape += dim
        else:
            shape += shape_of((dim,))
        position -= len(dim)
    return shape, place


def _viewed(value: Node, shape: list[int], builder: LocalBuilder) -> Node:
    return value if list(value_of(value).shape) == shape else builder.call(aten.reshape.default, value, shape)


def keeps_clean(node: Node, space: Space, result: int, position: int, clean: Callable[[int, int], bool]) -> bool:
    """Whether the padding of the atom at `position` of a result is zero, given which operands' is: `clean(operand, atom)`.

    So it is where a set of operands in which the op is linear is zero there, and what it makes of the other operands is finite.
    """
    rule = rule_of(node)
    factor = next(each for each in space.factors if each.results[result] == position)
    if node.target is aten.embedding_dense_backward.default and all(place is None for place in factor.operands):
        return True
    carriers = {operand: place for operand, place in enumerate(factor.operands) if place is not None}
    zero = {operand for operand, place in carriers.items() if clean(operand, place)}
    if rule is not None and (rule.view or _keeps_zero(node)):
        return bool(zero) and zero == set(carriers)
    finite = zero | {operand for operand in carriers if not value_of(operands(node)[operand]).dtype.is_floating_point}
    return finite == set(carriers) and any(group <= zero and (group >= finite or _is_finite(node)) for group in space.linear)


def _is_finite(node: Node) -> bool:
    """Whether what multiplies the arguments in which the op is linear is finite where the others are zero: not of x / y."""
    traits = traits_of(node)
    return node.target in _FINITE or (traits is not None and traits.is_finite)


def _keeps_zero(node: Node) -> bool:
    """Whether the op gives 0 where all operands are 0: relu does, exp does not."""
    traits = traits_of(node)
    if traits is not None:
        return traits.keeps_zero(**node.kwargs)
    if node.target is aten.pow.Tensor_Scalar:
        return float_at(node, 1) > 0
    return node.target in _KEEP_ZERO or node.target in MARKERS or node.target is operator.getitem


def with_atoms(dims: Dims, sizes: dict[int, int]) -> Dims:
    """`dims` with the sizes of the atoms at some positions replaced."""
    counted = iter(range(len(flat(dims))))
    return tuple(tuple(sizes.get(next(counted), atom) for atom in dim) for dim in dims)
