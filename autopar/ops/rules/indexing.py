"""Embeddings, gathers and scatters: dims that indices point into are blocked, or looked up part by part."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.arguments import arguments, node_at
from autopar.ops.rule import Label, Labels, Rule, rule
from autopar.ops.rules.labels import aligned, argument, aten, blocked, dim_of, is_zero, position_at, positional, shape_of, value_of, without


@rule(aten.embedding.default)
def embedding(node: Node) -> Rule:
    """(weight[v, h], ids) → [*ids, h]. A part of the vocabulary looks up its own ids and yields 0 for the others."""
    weight, ids = node.args[:2]
    labels = positional(len(shape_of(ids)), "i")
    return Rule(aligned(node, [(weight, ("v", "h")), (ids, labels)]), ((*labels, "h"),), linear=(position_at(node, 0),))


@rule(aten.embedding_dense_backward.default)
def embedding_backward(node: Node) -> Rule:
    """(gradient[*ids, h], ids, num_weights, padding, scale by frequency) → [v, h], summed over the ids."""
    gradient, ids = node.args[:2]
    labels = tuple(f"i{i}" for i in range(len(shape_of(ids))))
    operands = aligned(node, [(gradient, (*labels, "h")), (ids, labels)])
    # Frequencies count all ids, wherever they are.
    scaled = frozenset({"v", *labels}) if argument(node, 4, "scale_grad_by_freq", False) else frozenset[str]()
    return Rule(operands, (("v", "h"),), scaled, linear=(position_at(node, 0),))


def _index_labels(source: tuple[int, ...], indices: list[Node | None]) -> tuple[Labels, Labels, list[Labels]] | None:
    """Labels of the source, of what `source[indices]` yields, and of each index tensor; None for masks."""
    indexed = [i for i, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(value_of(index).dtype in (torch.bool, torch.uint8) for index in tensors):
        return None
    common = tuple(torch.broadcast_shapes(*(shape_of(index) for index in tensors)))
    index_labels = positional(len(common), "i")
    passing: Labels = without(positional(len(source)), indexed)
    kept = [(i, label) for i, label in enumerate(passing) if i not in indexed]
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    front = [label for i, label in kept if adjacent and i < indexed[0]]
    back = [label for i, label in kept if not adjacent or i > indexed[0]]
    result: list[Label] = [*front, *index_labels, *back]
    terms: list[Labels] = []
    for index in tensors:
        shape = shape_of(index)
        offset = len(common) - len(shape)
        terms.append(tuple(index_labels[offset + i] if size == common[offset + i] else None for i, size in enumerate(shape)))
    return passing, tuple(result), terms


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(node: Node) -> Rule | None:
    """`source[indices]`: dims without an index pass, indexed dims are needed whole, index dims walk with the result's."""
    source, indices = node_at(node, 0), list(arguments(node)[1])
    found = _index_labels(shape_of(source), indices)
    if found is None:
        return None
    passing, result, terms = found
    return Rule((passing, *terms), (result,), linear=(frozenset({0}),))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(node: Node) -> Rule | None:
    """Accumulating into zeros, the backward of `index`, is a sum over the index dims; else they are blocked."""
    source, indices, values = node_at(node, 0), list(arguments(node)[1]), node.args[2]
    masks = [index for index in indices if isinstance(index, Node) and value_of(index).dtype == torch.bool]
    if len(masks) == 1 == sum(index is not None for index in indices) and math.prod(shape_of(values)) == 1:
        return _masked_put(node, masks[0], indices.index(masks[0]))
    found = _index_labels(shape_of(source), indices)
    if found is None:
        return None
    passing, result, terms = found
    shape = shape_of(values)
    tail = result[len(result) - len(shape) :]
    # A broadcast value has size 1, or lacks the dim.
    region = _put_shape(shape_of(source), result, indices)
    tail = tuple(label if shape[i] == region[len(region) - len(shape) + i] else None for i, label in enumerate(tail))
    accumulate = bool(argument(node, 3, "accumulate", False))
    summed = accumulate and is_zero(source)
    blocked = frozenset(str(label) for label in result if label and str(label).startswith("i"))
    last = len(terms) + 1
    groups = [frozenset({0, last}), *([frozenset({last})] if is_zero(source) else []), *([frozenset({0})] if is_zero(values) else [])]
    return Rule((passing, *terms, tail), (passing,), frozenset() if summed else blocked, linear=tuple(groups))


def _masked_put(node: Node, mask: Node, first: int) -> Rule:
    """One value wherever a mask, which covers the dims from `first` on, says so: every position by itself."""
    labels = positional(len(shape_of(node)))
    order = aligned(
        node,
        [(node.args[0], labels), (mask, labels[first : first + len(shape_of(mask))]), (node.args[2], blocked(len(shape_of(node.args[2]))))],
    )
    return Rule(order, (labels,), linear=(frozenset({0, 2}), *((frozenset({0}),) if is_zero(node.args[2]) else ())))


def _put_shape(source: tuple[int, ...], result: Labels, indices: list[Node | None]) -> tuple[int, ...]:
    tensors = [index for index in indices if index is not None]
    common = tuple(torch.broadcast_shapes(*(shape_of(index) for index in tensors)))
    sizes = {f"i{i}": size for i, size in enumerate(common)} | {f"d{i}": size for i, size in enumerate(source)}
    return tuple(sizes[str(label)] for label in result)


def _together(source: tuple[int, ...], index: tuple[int, ...], dim: int) -> Labels:
    """Labels of the dims that walk together in a gather; a shorter index covers only the front of a dim."""
    return tuple(f"d{i}" if i != dim and source[i] == size else None for i, size in enumerate(index))


def _looked_up(source: Any, dim: int) -> str | None:
    """The label of the dim that ids point into, where ranks can look up the ids that they have: classes, the last of several dims.

    Each rank yields 0 for ids that are elsewhere, so the results are sums.
    """
    value = value_of(source)
    return "v" if 0 < dim == value.dim() - 1 and value.dtype != torch.bool else None


@rule(aten.gather.default)
def gather(node: Node) -> Rule:
    source, ids = node.args[0], node.args[2]
    shapes = shape_of(source), shape_of(ids)
    dim = dim_of(node.args[1], len(shapes[0]))
    labels = _together(*shapes, dim)
    along = tuple("i" if i == dim else label for i, label in enumerate(labels))
    whole = tuple(_looked_up(source, dim) if i == dim else label for i, label in enumerate(labels))
    return Rule(aligned(node, [(source, whole), (ids, along)]), (along,), linear=(position_at(node, 0),))


@rule(aten.index_select.default)
def index_select(node: Node) -> Rule:
    source, ids = node.args[0], node.args[2]
    labels = positional(len(shape_of(source)))
    dim = dim_of(node.args[1], len(labels))
    result = tuple("i" if i == dim else label for i, label in enumerate(labels))
    operands = aligned(node, [(source, without(labels, (dim,))), (ids, ("i",) * len(shape_of(ids)))])
    return Rule(operands, (result,), linear=(position_at(node, 0),))


@rule(aten.index_fill.int_Scalar)
def index_fill(node: Node) -> Rule:
    """(source, dim, ids, value)"""
    source, ids = node.args[0], node.args[2]
    labels = positional(len(shape_of(source)))
    labels = without(labels, (dim_of(node.args[1], len(labels)),))
    order = aligned(node, [(source, labels), (ids, (None,) * len(shape_of(ids)))])
    return Rule(order, (labels,), linear=(position_at(node, 0),) if is_zero(node.args[3]) else ())


@rule(aten.index_add.default, aten.index_copy.default)
def index_add(node: Node) -> Rule:
    """(source, dim, ids, values). Adding into zeros is a sum over the ids; else they are blocked."""
    source, ids, values = node.args[0], node.args[2], node.args[3]
    labels = positional(len(shape_of(source)))
    dim = dim_of(node.args[1], len(labels))
    whole = without(labels, (dim,))
    summed = node.target is aten.index_add.default and is_zero(source)
    along = tuple("i" if i == dim and summed else label for i, label in enumerate(whole))
    order = aligned(node, [(source, whole), (ids, ("i" if summed else None,) * len(shape_of(ids))), (values, along)])
    joint = position_at(node, 0) | position_at(node, 3)
    return Rule(order, (whole,), linear=(joint, position_at(node, 3)) if is_zero(source) else (joint,))


@rule(aten.scatter_reduce.two)
def scatter_reduce(node: Node) -> Rule:
    """(source, dim, ids, values, reduction): the dim is blocked; see `scatter_add` for a sum."""
    source, ids, values = node.args[0], node.args[2], node.args[3]
    labels = _together(shape_of(source), shape_of(ids), dim_of(node.args[1], len(shape_of(source))))
    labels = tuple(label if shape_of(values)[i] == shape_of(source)[i] else None for i, label in enumerate(labels))
    linear = (position_at(node, 0) | position_at(node, 3),) if node.args[4] in ("sum", "mean") else ()
    return Rule(aligned(node, [(source, labels), (ids, labels), (values, labels)]), (labels,), linear=linear)


@rule(aten.scatter.value)
def scatter_value(node: Node) -> Rule:
    source, ids = node.args[0], node.args[2]
    labels = _together(shape_of(source), shape_of(ids), dim_of(node.args[1], len(shape_of(source))))
    return Rule(aligned(node, [(source, labels), (ids, labels)]), (labels,))


@rule(aten.scatter.src, aten.scatter_add.default)
def scatter(node: Node) -> Rule:
    """(source, dim, ids, values). Adding into zeros is a sum over the ids along `dim`; else they are blocked."""
    source, ids, values = node.args[0], node.args[2], node.args[3]
    shape = shape_of(source)
    dim = dim_of(node.args[1], len(shape))
    labels = _together(shape, shape_of(ids), dim)
    labels = tuple(label if shape_of(values)[i] == shape[i] else None for i, label in enumerate(labels))
    summed = node.target is aten.scatter_add.default and is_zero(source) and shape_of(values) == shape_of(ids)
    along = tuple("i" if i == dim and summed else label for i, label in enumerate(labels))
    joint = position_at(node, 0) | position_at(node, 3)
    linear = (joint, position_at(node, 3)) if is_zero(source) else (joint,)
    if node.target is aten.scatter_add.default and shape_of(values) == shape_of(ids):
        labels = tuple(_looked_up(source, dim) if i == dim else label for i, label in enumerate(labels))
    return Rule(aligned(node, [(source, labels), (ids, along), (values, along)]), (labels,), linear=linear)
