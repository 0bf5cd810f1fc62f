"""Ops that move elements without computing: views, transposes, slices, concatenations."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from autopar.ir.markers import held, pinned, recut, reduced, save
from autopar.ir.program import operands, results_of
from autopar.ops.rule import Labels, Rule, rule
from autopar.ops.rules.labels import aligned, argument, aten, blocked, dim_of, dims_of, is_zero, position_at, positional, shape_of, without
from autopar.ops.traits import PERMUTES, permutation

_FIRST = (frozenset({0}),)


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    save,
    pinned,
    held,
    recut,
)
def view(node: Node) -> Rule:
    return Rule((blocked(len(shape_of(node.args[0]))),), (blocked(len(shape_of(node))),), linear=_FIRST, view=True)


@rule(reduced)
def of_reduced(node: Node) -> Rule:
    """Not linear, as every other view is: that is what it is for."""
    labels = positional(len(shape_of(node)))
    return Rule((labels,), (labels,))


@rule(operator.getitem)
def getitem(node: Node) -> Rule:
    """The result at an index of a multi-result node: the one operand stands for that result alone."""
    labels = positional(len(shape_of(node)))
    return Rule((labels,), (labels,), linear=_FIRST, view=True)


@rule(*PERMUTES)
def permute(node: Node) -> Rule:
    source = positional(len(shape_of(node.args[0])))
    return Rule((source,), (tuple(source[i] for i in permutation(node)),), linear=_FIRST)


@rule(aten.expand.default)
def expand(node: Node) -> Rule:
    source, result = shape_of(node.args[0]), shape_of(node)
    labels = positional(len(result))
    tail = labels[len(labels) - len(source) :]
    grown = [i for i, size in enumerate(source) if size != result[len(result) - len(source) + i]]
    return Rule((without(tail, grown),), (labels,), linear=_FIRST)


@rule(aten.repeat.default)
def repeat(node: Node) -> Rule:
    source, result = shape_of(node.args[0]), shape_of(node)
    offset = len(result) - len(source)
    labels = positional(len(result))
    repeated = [i for i, count in enumerate(argument(node, 1, "repeats")) if count != 1]
    results = without(labels, repeated)
    return Rule((results[offset:],), (results,), linear=_FIRST)


def _one_dim_blocked(node: Node, dims: tuple[int, ...]) -> Rule:
    """Every dim passes but `dims`, whose elements mix or move; the result has as many dims as the operand."""
    labels = positional(len(shape_of(node.args[0])))
    labels = without(labels, dims)
    return Rule((labels,), (labels,) * len(results_of(node)), linear=_FIRST)


@rule(aten.slice.Tensor, aten.slice_backward.default)
def slice_dim(node: Node) -> Rule:
    before, after = shape_of(node.args[0]), shape_of(node)
    return _one_dim_blocked(node, tuple(i for i, size in enumerate(before) if size != after[i]))


@rule(aten.flip.default, aten.roll.default)
def flip(node: Node) -> Rule | None:
    dims = argument(node, 1 if node.target is aten.flip.default else 2, "dims", ())
    return _one_dim_blocked(node, dims_of(dims, len(shape_of(node))))


@rule(aten.tril.default, aten.triu.default)
def triangle(node: Node) -> Rule:
    num_dims = len(shape_of(node))
    return _one_dim_blocked(node, (num_dims - 2, num_dims - 1))


@rule(aten.constant_pad_nd.default)
def constant_pad(node: Node) -> Rule:
    num_dims, pads = len(shape_of(node)), argument(node, 1, "pad")
    padded = tuple(num_dims - 1 - i // 2 for i, pad in enumerate(pads) if pad != 0)
    found = _one_dim_blocked(node, padded)
    linear = _FIRST if is_zero(argument(node, 2, "value", 0)) else ()
    return Rule(found.operands, found.results, linear=linear)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
def split(node: Node) -> Rule:
    return _one_dim_blocked(node, (dim_of(argument(node, 2, "dim", 0), len(shape_of(node.args[0]))),))


@rule(aten.unbind.int)
def unbind(node: Node) -> Rule:
    source = positional(len(shape_of(node.args[0])))
    dim = dim_of(argument(node, 1, "dim", 0), len(source))
    return Rule((without(source, (dim,)),), (source[:dim] + source[dim + 1 :],) * len(results_of(node)), linear=_FIRST)


@rule(aten.select.int)
def select(node: Node) -> Rule:
    source = positional(len(shape_of(node.args[0])))
    dim = dim_of(node.args[1], len(source))
    return Rule((without(source, (dim,)),), (source[:dim] + source[dim + 1 :],), linear=_FIRST)


@rule(aten.select_backward.default)
def select_backward(node: Node) -> Rule:
    result = positional(len(shape_of(node)))
    dim = dim_of(argument(node, 2, "dim"), len(result))
    return Rule((result[:dim] + result[dim + 1 :],), (without(result, (dim,)),), linear=_FIRST)


@rule(aten.unfold.default)
def unfold(node: Node) -> Rule:
    """Sliding windows along a dim, which is blocked; the window is a new last dim."""
    source = positional(len(shape_of(node.args[0])))
    labels = without(source, (dim_of(node.args[1], len(source)),))
    return Rule((labels,), ((*labels, None),), linear=_FIRST)


@rule(aten.unfold_backward.default)
def unfold_backward(node: Node) -> Rule:
    """(gradient, input sizes, dim, size, step)"""
    result = positional(len(shape_of(node)))
    labels = without(result, (dim_of(node.args[2], len(result)),))
    return Rule(((*labels, None),), (labels,), linear=_FIRST)


def _diagonal(num_dims: int, first: Any, second: Any) -> tuple[Labels, Labels]:
    """Labels of a tensor of `num_dims` dims, whose diagonal over two of them is taken, and of the diagonal."""
    both = (dim_of(first, num_dims), dim_of(second, num_dims))
    whole = without(positional(num_dims), both)
    return whole, (*(label for i, label in enumerate(whole) if i not in both), None)


@rule(aten.diagonal.default)
def diagonal(node: Node) -> Rule:
    """(input, offset, dim1, dim2): both dims become one at the end."""
    whole, part = _diagonal(len(shape_of(node.args[0])), argument(node, 2, "dim1", 0), argument(node, 3, "dim2", 1))
    return Rule((whole,), (part,), linear=_FIRST)


@rule(aten.diagonal_backward.default)
def diagonal_backward(node: Node) -> Rule:
    """(gradient, input sizes, offset, dim1, dim2)"""
    whole, part = _diagonal(len(shape_of(node)), node.args[3], node.args[4])
    return Rule((part,), (whole,), linear=_FIRST)


@rule(aten.diag_embed.default)
def diagonal_matrix(node: Node) -> Rule:
    """(input, offset, dim1, dim2): the last dim becomes two."""
    whole, part = _diagonal(len(shape_of(node)), argument(node, 2, "dim1", -2), argument(node, 3, "dim2", -1))
    return Rule((part,), (whole,), linear=_FIRST)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(node: Node) -> Rule:
    """(input, diagonal, offset, dim1, dim2): the diagonal written into the input."""
    whole, part = _diagonal(len(shape_of(node)), argument(node, 3, "dim1", 0), argument(node, 4, "dim2", 1))
    return Rule((whole, part), (whole,), linear=(frozenset({0, 1}),))


@rule(aten.view_as_complex.default)
def view_as_complex(node: Node) -> Rule:
    labels = positional(len(shape_of(node)))
    return Rule(((*labels, None),), (labels,), linear=_FIRST)


@rule(aten.view_as_real.default)
def view_as_real(node: Node) -> Rule:
    labels = positional(len(shape_of(node.args[0])))
    return Rule((labels,), ((*labels, None),), linear=_FIRST)


@rule(aten.view.dtype)
def view_dtype(node: Node) -> Rule:
    """The bits of neighbours along the last dim are read as one number, or those of one number as several."""
    labels = positional(len(shape_of(node)))
    is_one_by_one = shape_of(node) == shape_of(node.args[0])
    labels = labels if is_one_by_one else (*labels[:-1], None)
    return Rule((labels,), (labels,))


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def scatter_part(node: Node) -> Rule:
    """The second operand written into the first."""
    result = positional(len(shape_of(node)))
    dim = dim_of(argument(node, 2, "dim", 0), len(result))
    whole = without(result, (dim,))
    part = whole if node.target is aten.slice_scatter.default else result[:dim] + result[dim + 1 :]
    linear = [frozenset({0, 1})] + ([position_at(node, 1)] if is_zero(node.args[0]) else [])
    return Rule((whole, part), (whole,), linear=tuple(linear))


@rule(aten.cat.default, aten.stack.default)
def concatenate(node: Node) -> Rule | None:
    """Parts side by side along a dim, which is blocked."""
    parts, num_dims = operands(node), len(shape_of(node))
    dim = dim_of(argument(node, 1, "dim", 0), num_dims)
    result = without(positional(num_dims), (dim,))
    part: Labels = result if node.target is aten.cat.default else result[:dim] + result[dim + 1 :]
    if any(len(shape_of(operand)) != len(part) for operand in parts):
        return None
    return Rule(aligned(node, [(operand, part) for operand in parts]), (result,), linear=(frozenset(range(len(parts))),))
