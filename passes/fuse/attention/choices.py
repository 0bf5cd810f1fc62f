"""An added mask that is 0 where something holds and one number elsewhere: a fill of the scores, written another way."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import node_at
from autopar.ops.traits import PRODUCTS, is_cast
from autopar.passes.fuse.attention.layout import Labels, Layout, above, broadcast_to
from autopar.passes.fuse.attention.scores import Filled

aten = torch.ops.aten

_CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)


def choice_at(value: Node, layout: Layout, factor: float, labels: Labels, constants: Constants) -> Filled | None:
    """`factor` · `value`, which carries `layout`, as a fill: where(condition, 0, number), its like, or (1 − condition) · number."""
    while (moved := _same(value, layout, labels)) is not None:
        value, layout = moved
    found = None
    if value.target in _CHOICES:
        found = _chosen(value, constants)
    elif value.target in _FILLS and constants.number(value.args[0]) == 0.0:
        found = value.args[1], constants.number(value.args[2]), False
    elif value.target in PRODUCTS:
        found = _multiplied(value, constants)
    if found is None:
        return None
    condition, number, attends = found
    if number is None or not isinstance(condition, Node):
        return None
    return Filled(condition, broadcast_to(layout, tensor_of(condition).shape), number * factor, attends)


def _same(value: Node, layout: Layout, labels: Labels) -> tuple[Node, Layout] | None:
    if value.op != "call_function" or not isinstance(value.meta.get("val"), torch.Tensor):
        return None
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
    for held, other in (value.args[:2], value.args[1::-1]):
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
