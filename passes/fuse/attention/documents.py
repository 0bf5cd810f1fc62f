"""Masks of packed sequences: rows and keys attend where the ids of their documents are equal.

    ids[:, None, :, None] == ids[:, None, None, :]     alone, or and-ed with anything else, or its opposite or-ed

Ids may be indexed, viewed, expanded or gathered by `arange`, as transformers does; what they are is not asked, but that they are integers:
a NaN is unequal to itself, and the op compares what it is given.

Of ids that count where positions restart, transformers compares the positions as well, for a causal mask. There they say what row
and key numbers say: within a document each position is one more than that before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import Emitter, tensor_of
from autopar.ir.arguments import arguments, int_at, node_at
from autopar.ops.traits import CASTS
from autopar.passes.fuse.attention.layout import Labels, Layout, above, broadcast_to, flat
from autopar.passes.fuse.attention.relayout import arranged, broadcast_layout

aten = torch.ops.aten

_ANDS = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.mul.Tensor)
_ORS = (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor)
_NOTS = (aten.logical_not.default, aten.bitwise_not.default)
_SAME = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class Condition:
    """A bool tensor that carries `layout`: rows attend to keys where it is `attends`."""

    node: Node
    layout: Layout
    attends: bool


@dataclass(frozen=True)
class Ids:
    """Integers that carry `layout`: batches and rows, or batches and keys."""

    node: Node
    layout: Layout


@dataclass(frozen=True)
class Documents:
    """Rows attend to keys where their ids are equal."""

    rows: Ids
    keys: Ids

    def nodes(self) -> tuple[Node, Node]:
        return self.rows.node, self.keys.node

    def laid_out(self, emit: Emitter, scores: Layout, labels: Labels) -> tuple[Node, Node]:
        """As the op takes them: [B, S] and [B, T], B being 1 where they are the same for all samples."""
        wanted = ((ids, (scores[0], scores[dim])) for ids, dim in ((self.rows, 2), (self.keys, 3)))
        rows, keys = (arranged(emit, ids.node, ids.layout, broadcast_layout(ids.layout, layout, labels), labels) for ids, layout in wanted)
        return rows, keys


def conjunction(condition: Condition, labels: Labels, constants: Constants) -> list[Condition]:
    """Conditions all of which hold where `condition` does: itself where it is none of several."""
    node = condition.node
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor) or tensor_of(node).dtype != torch.bool:
        return [condition]
    if node.target in _NOTS and _is_bool(node.args[0]):
        return conjunction(Condition(node_at(node, 0), condition.layout, not condition.attends), labels, constants)
    if node.target in (_ANDS if condition.attends else _ORS) and all(_is_bool(operand) for operand in node.args):
        return [part for operand in arguments(node) for part in conjunction(_operand(condition, operand), labels, constants)]
    inner = _unmoved(node, condition.layout, labels, constants)
    if inner is not None and _is_bool(inner[0]):
        return conjunction(Condition(*inner, condition.attends), labels, constants)
    return [condition]


def documents_at(condition: Condition, wanted: Layout, labels: Labels, constants: Constants) -> Documents | None:
    """What `condition` compares, where it compares ids of documents. `wanted` is the layout of the op's scores."""
    found = _compared(condition, aten.eq.Tensor if condition.attends else aten.ne.Tensor, labels, constants)
    if found is None:
        return None
    for rows, keys in (found, found[::-1]):
        if _lies(rows, wanted, 2, labels) and _lies(keys, wanted, 3, labels):
            return Documents(rows, keys)
    return None


def reaches_itself(documents: Documents, wanted: Layout, labels: Labels) -> bool:
    """Whether rows and keys are the same positions with the same ids: each row then finds its own key."""
    rows, keys = (labels.layout(wanted)[dim] for dim in (2, 3))
    if documents.rows.node is not documents.keys.node or labels.size(rows) != labels.size(keys):
        return False
    layouts = (labels.layout(each.layout) for each in (documents.rows, documents.keys))
    return all(one == other or (one, other) == (rows, keys) for one, other in zip(*layouts, strict=True))


def is_triangle_within(condition: Condition, documents: Documents, wanted: Layout, labels: Labels, constants: Constants) -> bool:
    """Whether `condition` says, within each document, that a row attends to no later key.

    It compares positions, and a document ends wherever the next position is not one more:
    ids = cumsum(diff(positions, prepend=…) != 1).
    """
    up_to, beyond = (aten.le.Tensor, aten.ge.Tensor), (aten.gt.Tensor, aten.lt.Tensor)
    for target, is_swapped in zip(up_to if condition.attends else beyond, (False, True), strict=True):
        found = _compared(condition, target, labels, constants)
        if found is None:
            continue
        keys, rows = reversed(found) if is_swapped else found
        positions = _counted(documents.rows.node, constants)
        as_ids = (rows.layout, keys.layout) == (documents.rows.layout, documents.keys.layout)
        return positions is not None and rows.node is keys.node is positions and as_ids and reaches_itself(documents, wanted, labels)
    return False


def _operand(condition: Condition, operand: Node) -> Condition:
    return Condition(operand, broadcast_to(condition.layout, tensor_of(operand).shape), condition.attends)


def _is_bool(value: object) -> bool:
    return isinstance(value, Node) and tensor_of(value).dtype == torch.bool


def _compared(condition: Condition, target: object, labels: Labels, constants: Constants) -> tuple[Ids, Ids] | None:
    """Both sides of a comparison of integers, as they were before they were laid out."""
    node = condition.node
    if node.target is not target or not all(isinstance(operand, Node) for operand in node.args):
        return None
    sides: list[Ids] = []
    for operand in node.args:
        assert isinstance(operand, Node)
        dtype = tensor_of(operand).dtype
        if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
            return None
        sides.append(_origin(Ids(operand, broadcast_to(condition.layout, tensor_of(operand).shape)), labels, constants))
    left, right = (Ids(each.node, labels.layout(each.layout)) for each in sides)
    return left, right


def _origin(ids: Ids, labels: Labels, constants: Constants) -> Ids:
    while (moved := _unmoved(ids.node, ids.layout, labels, constants)) is not None:
        ids = Ids(*moved)
    return ids


def _lies(ids: Ids, wanted: Layout, dim: int, labels: Labels) -> bool:
    """Whether `ids` vary along the op's rows (`dim` 2) or keys (3), perhaps along batches, and along nothing else."""
    own, batches, there = (set(labels.resolved(part)) for part in (wanted[dim], wanted[0], flat(ids.layout)))
    return own <= there <= own | batches


def _unmoved(node: Node, layout: Layout, labels: Labels, constants: Constants) -> tuple[Node, Layout] | None:
    """The operand of a node that leaves values as they are but for how they lie, and its layout."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if (moved := above(node, layout, labels)) is not None:
        return moved
    if node.target is aten.index.Tensor:
        return _ungathered(node, labels.layout(layout), constants)
    operand = node.args[0] if node.args else None
    if not isinstance(operand, Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
        return None
    kept = tensor_of(operand).shape == tensor_of(node).shape and tensor_of(operand).dtype == tensor_of(node).dtype
    # A slice that keeps the shape is of all.
    return (operand, layout) if kept and node.target in (*_SAME, *CASTS, aten.slice.Tensor) else None


def _ungathered(node: Node, layout: Layout, constants: Constants) -> tuple[Node, Layout] | None:
    """What is indexed along every dim by 0, 1, 2, …, each in a dim of its own of the result."""
    source, indices = arguments(node)[:2]
    assert isinstance(source, Node) and isinstance(indices, (list, tuple))
    shape, num_dims = tensor_of(source).shape, len(layout)
    if len(indices) != len(shape) or not all(isinstance(index, Node) for index in indices):
        return None
    found: list[tuple[int, ...]] = []
    for index, size in zip(indices, shape, strict=True):
        value = constants.value(index)
        if value is None or value.dtype == torch.bool or value.numel() != size or not bool((value.flatten() == torch.arange(size)).all()):
            return None
        dims = [dim + num_dims - value.dim() for dim, length in enumerate(value.shape) if length > 1]
        if len(dims) > 1:
            return None
        found.append(layout[dims[0]] if dims else ())
    taken = [each for each in found if each]
    return (source, tuple(found)) if len(set(taken)) == len(taken) else None


def _counted(ids: Node, constants: Constants) -> Node | None:
    """The positions of which `ids` count the restarts: cumsum(diff(positions, prepend=…) != 1), along the last dim."""
    for target in (aten.cumsum.default, aten.ne.Scalar, aten.diff.default):
        # Fewer bits count around: other documents would get the same number, and positions would not rise.
        if ids.target is not target or tensor_of(ids).dtype not in (torch.bool, torch.int32, torch.int64):
            return None
        last = tensor_of(ids).dim() - 1
        if target is aten.cumsum.default and int_at(ids, 1) % (last + 1) != last:
            return None
        if target is aten.ne.Scalar and ids.args[1] != 1:
            return None
        if target is aten.diff.default:
            return _counted_in(ids)
        ids = node_at(ids, 0)
    return None


def _counted_in(diff: Node) -> Node | None:
    defaults: tuple[Any, ...] = (1, -1, None, None)
    source, count, dim, prepended, appended = (*arguments(diff), *defaults[len(diff.args) - 1 :])[:5]
    assert isinstance(source, Node)
    num_dims = tensor_of(source).dim()
    # What stands before the first position only sets with which id the first document starts.
    fits = count == 1 and int(dim) % num_dims == num_dims - 1 and isinstance(prepended, Node) and appended is None
    return source if fits and tensor_of(diff).shape == tensor_of(source).shape else None
