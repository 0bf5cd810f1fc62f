"""Tables of ATen overloads that mean the same: all products, all casts, all views.

They list the ops that `torch.export` leaves in a graph, in-place ones included; `out_of_place` removes these, for readers that stop at a
write. Tables that look alike and mean something else are where they are used: what is linear in LOCAL graphs, where collectives are as well
(`autopar/graph/microbatches.py`), what may share memory (`autopar/graph/overwrites.py`), what costs nothing (`autopar/cost/model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import OpOverload, writes_operands
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import all_named, int_at, ints_at

aten = torch.ops.aten

PRODUCTS = (aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar, aten.multiply.Tensor)
QUOTIENTS = (aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar, aten.true_divide.Tensor, aten.divide.Tensor)
SUMS = (aten.add.Tensor, aten.add_.Tensor, aten.add.Scalar, aten.add_.Scalar)
DIFFERENCES = (aten.sub.Tensor, aten.sub_.Tensor, aten.sub.Scalar, aten.subtract.Tensor)
NEGATIONS = (aten.neg.default, aten.neg_.default)
# x where a mask does not hold, a number where it does; and by an op that takes both.
FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)
CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default)
# The packets of those among them that give their operand itself where there is nothing to cast.
CASTS_OR_NOTHING = (aten.to, aten.type_as)
# The operand itself, perhaps in other memory.
COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
# The same elements in the same order, in another shape.
RESHAPES = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_as.default, aten.reshape_as.default,
    aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
# The same elements, with the dims in another order; see `permutation`.
PERMUTES = (aten.t.default, aten.transpose.int, aten.permute.default)
EXPANSIONS = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
# Views of a traced graph that show all of their operand, each element once.
WHOLE_VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default,
        aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default,
    }
)  # fmt: skip
# These, and what widens: where the operand is there they take no memory, so that the backward makes them anew.
MADE_ANEW = WHOLE_VIEWS | {aten.expand.default}


def out_of_place(ops: Sequence[Any]) -> tuple[Any, ...]:
    """`ops` without those that write into their operand."""
    return tuple(op for op in ops if not writes_operands(op))


def truncates(node: Node) -> bool:
    """Whether a sum takes the integers of what it is given, floats, before it adds them: of a sum it is not the sum of what it makes of
    the terms."""
    dtype = node.kwargs.get("dtype")
    is_integer = isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)
    return is_integer and tensor_of(node.args[0]).is_floating_point()


def rounds(node: Node) -> bool:
    """Whether `_to_copy`, or `copy` of its last operand, takes floats for integers, or numbers for true and false: of a sum it is not the
    sum of what it makes of the terms."""
    source, target = tensor_of(node.all_input_nodes[-1]).dtype, tensor_of(node).dtype
    return target == torch.bool or (not (target.is_floating_point or target.is_complex) and (source.is_floating_point or source.is_complex))


def permutation(node: Node) -> tuple[int, ...]:
    """For each dim of a result of `PERMUTES` the dim of its operand that it is."""
    rank = tensor_of(node).ndim
    if node.target is aten.permute.default:
        return tuple(dim % rank for dim in ints_at(node, 1))
    order = list(range(rank))
    if rank > 1:
        one, other = (0, 1) if node.target is aten.t.default else (int_at(node, 1), int_at(node, 2))
        order[one], order[other] = order[other], order[one]
    return tuple(order)


def is_cast(node: Node) -> bool:
    """Whether `node` is its operand in a floating-point dtype."""
    return node.target in CASTS and tensor_of(node).is_floating_point()


def casts_at_need(node: Node) -> bool:
    """Whether a call gives its operand in another dtype, by an op that gives the operand itself where it has that dtype."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket not in CASTS_OR_NOTHING or all_named(node).get("copy"):
        return False
    before, after = (each.meta.get("val") for each in (node.all_input_nodes[0], node))
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype != after.dtype


def widens(cast: Node) -> bool:
    """Whether every floating-point value survives `cast` as it is."""
    before, after = tensor_of(cast.args[0]).dtype, tensor_of(cast).dtype
    return before.is_floating_point and torch.promote_types(before, after) == after
