"""Conditions under which rows attend to keys: what several of them say together, ids that they compare, choices that are added.

Rows and keys of packed sequences attend where the ids of their documents are equal:

    ids[:, None, :, None] == ids[:, None, None, :]     alone, or and-ed with anything else, or its opposite or-ed

Ids may be indexed, viewed, expanded or gathered by `arange`, as transformers does; what they are is not asked, but that they are integers:
a NaN is unequal to itself, and the op compares what it is given.

Of ids that count where positions restart, transformers compares the positions as well, for a causal mask. There they say what row
and key numbers say: within a document each position is one more than that before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import Emitter, tensor_of
from autopar.ir.arguments import arguments, int_at, node_at
from autopar.ops.rules.labels import argument
from autopar.ops.traits import CASTS, CHOICES, COPIES, FILLS, PRODUCTS, is_cast, out_of_place
from autopar.passes.fuse.attention.layout import Labels, Layout, Placed, Scaled, above, broadcast_to, flat
from autopar.passes.fuse.reading import is_tensor, operand_pairs

aten = torch.ops.aten

_ANDS = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.mul.Tensor)
_ORS = (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor)
_NOTS = (aten.logical_not.default, aten.bitwise_not.default)
_SAME = (*COPIES, *CASTS, aten.detach.default, aten.slice.Tensor)


@dataclass(frozen=True)
class Condition(Placed):
    """A bool tensor that carries `layout`: rows attend to keys where it is `attends`."""

    attends: bool


@dataclass(frozen=True)
class Filled(Condition):
    """Scores become `value` where the condition is not `attends`."""

    value: float


AnyCondition = TypeVar("AnyCondition", bound=Condition)


@dataclass(frozen=True)
class Documents:
    """Rows attend to keys where their ids are equal: integers that vary along batches and rows, or batches and keys."""

    rows: Placed
    keys: Placed

    def nodes(self) -> tuple[Node, Node]:
        return self.rows.node, self.keys.node

    def laid_out(self, emit: Emitter, scores: Layout, labels: Labels) -> tuple[Node, Node]:
        """As the op takes them: [B, S] and [B, T], B being 1 where they are the same for all samples."""
        return self.rows.along(emit, (scores[0], scores[2]), labels), self.keys.along(emit, (scores[0], scores[3]), labels)


def conjunction(condition: AnyCondition, labels: Labels, constants: Constants) -> list[AnyCondition]:
    """Conditions all of which hold where `condition` does: itself where it is none of several. Each is there once."""
    seen = set[AnyCondition]()  # of x & f(x) both operands lead to x

    def parts(condition: AnyCondition) -> list[AnyCondition]:
        known = replace(condition, layout=labels.layout(condition.layout))
        if known in seen:
            return []
        seen.add(known)
        node, layout = condition.node, condition.layout
        if node.op != "call_function" or not _is_bool(node):
            return [condition]
        if node.target in _NOTS and _is_bool(node.args[0]):
            return parts(replace(condition, node=node_at(node, 0), attends=not condition.attends))
        if node.target in (_ANDS if condition.attends else _ORS) and all(_is_bool(operand) for operand in node.args):
            each = (replace(condition, node=part, layout=broadcast_to(layout, tensor_of(part).shape)) for part in arguments(node))
            return [part for operand in each for part in parts(operand)]
        inner = _unmoved(node, layout, labels, constants)
        if inner is not None and _is_bool(inner[0]):
            return parts(replace(condition, node=inner[0], layout=inner[1]))
        return [condition]

    return parts(condition)


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


def choice_at(mask: Scaled, labels: Labels, constants: Constants) -> Filled | None:
    """An added mask that is 0 where something holds and one number elsewhere, as a fill of the scores.

    It is where(condition, 0, number), its like, or (1 − condition) · number.
    """
    value, layout = mask.node, mask.layout
    while (moved := _same_float(value, layout, labels)) is not None:
        value, layout = moved
    found = None
    if value.target in (*CHOICES, aten.where.Scalar):
        found = _chosen(value, constants)
    elif value.target in out_of_place(FILLS) and constants.number(value.args[0]) == 0.0:
        found = value.args[1], constants.number(value.args[2]), False
    elif value.target in PRODUCTS:
        found = _multiplied(value, constants)
    condition, number, attends = found or (None, None, False)
    if number is None or not isinstance(condition, Node):
        return None
    return Filled(condition, broadcast_to(layout, tensor_of(condition).shape), attends, number * mask.scale)


def _same_float(value: Node, layout: Layout, labels: Labels) -> tuple[Node, Layout] | None:
    if is_cast(value) and tensor_of(value.args[0]).is_floating_point():
        return node_at(value, 0), layout
    return above(value, layout, labels)


def _chosen(value: Node, constants: Constants) -> tuple[object, float | None, bool] | None:
    condition, one, other = value.args[:3]
    numbers = constants.number(one), constants.number(other)
    if numbers[0] == 0.0:
        return condition, numbers[1], True
    return (condition, numbers[0], False) if numbers[1] == 0.0 else None


def _multiplied(value: Node, constants: Constants) -> tuple[object, float | None, bool] | None:
    for held, other in operand_pairs(value):
        number = constants.number(other)
        # −inf · 0 is NaN.
        if number is None or not math.isfinite(number) or not isinstance(held, Node):
            continue
        attends = held.target in (aten.rsub.Scalar, aten.rsub.Tensor)
        if attends and (held.args[1] != 1 or held.kwargs):
            return None
        cast = held.args[0] if attends else held
        if isinstance(cast, Node) and is_cast(cast) and tensor_of(cast.args[0]).dtype == torch.bool:
            return cast.args[0], number, attends
    return None


def _is_bool(value: object) -> bool:
    return is_tensor(value) and tensor_of(value).dtype == torch.bool


def _compared(condition: Condition, target: object, labels: Labels, constants: Constants) -> tuple[Placed, Placed] | None:
    """Both sides of a comparison of integers, as they were before they were laid out."""
    node = condition.node
    if node.target is not target or not all(isinstance(operand, Node) for operand in node.args):
        return None
    sides: list[Placed] = []
    for operand in node.args:
        assert isinstance(operand, Node)
        dtype = tensor_of(operand).dtype
        if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
            return None
        layout = broadcast_to(condition.layout, tensor_of(operand).shape)
        while (moved := _unmoved(operand, layout, labels, constants)) is not None:
            operand, layout = moved
        sides.append(Placed(operand, layout))
    left, right = (Placed(each.node, labels.layout(each.layout)) for each in sides)
    return left, right


def _lies(ids: Placed, wanted: Layout, dim: int, labels: Labels) -> bool:
    """Whether `ids` vary along the op's rows (`dim` 2) or keys (3), perhaps along batches, and along nothing else."""
    own, batches, there = (set(labels.resolved(part)) for part in (wanted[dim], wanted[0], flat(ids.layout)))
    return own <= there <= own | batches


def _unmoved(node: Node, layout: Layout, labels: Labels, constants: Constants) -> tuple[Node, Layout] | None:
    """The operand of a node that leaves values as they are but for how they lie, and its layout."""
    if (moved := above(node, layout, labels)) is not None:
        return moved
    if node.target is aten.index.Tensor:
        return _ungathered(node, labels.layout(layout), constants)
    operand = node.args[0] if node.target in _SAME else None
    if not isinstance(operand, Node) or not is_tensor(operand):
        return None
    # A slice that keeps the shape is of all.
    kept = tensor_of(operand).shape == tensor_of(node).shape and tensor_of(operand).dtype == tensor_of(node).dtype
    return (operand, layout) if kept else None


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
    found = [ids]
    for target in (aten.cumsum.default, aten.ne.Scalar, aten.diff.default):
        # Fewer bits count around: other documents would get the same number, and positions would not rise.
        if found[-1].target is not target or tensor_of(found[-1]).dtype not in (torch.bool, torch.int32, torch.int64):
            return None
        found.append(node_at(found[-1], 0))
    total, unequal, diff, source = found
    count, dim = argument(diff, 1, "n", 1), argument(diff, 2, "dim", -1)
    prepended, appended = argument(diff, 3, "prepend"), argument(diff, 4, "append")
    last = tensor_of(source).dim() - 1
    # What stands before the first position only sets with which id the first document starts.
    fits = count == unequal.args[1] == 1 and isinstance(prepended, Node) and appended is None
    along = all(int(each) % (last + 1) == last for each in (int_at(total, 1), dim))
    return source if fits and along and tensor_of(diff).shape == tensor_of(source).shape else None
