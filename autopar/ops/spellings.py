"""The ATen ops that say the same thing: what users and tracers write for a product, a quotient, a cast."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of

aten = torch.ops.aten

CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)
PRODUCTS = (aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar, aten.multiply.Tensor)
QUOTIENTS = (aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar, aten.true_divide.Tensor, aten.divide.Tensor)


def is_cast(node: Node) -> bool:
    """Whether `node` is its operand in a floating-point dtype."""
    return node.target in CASTS and tensor_of(node).is_floating_point()


def widens(cast: Node) -> bool:
    """Whether every floating-point value survives `cast` as it is."""
    before, after = tensor_of(cast.args[0]).dtype, tensor_of(cast).dtype
    return before.is_floating_point and torch.promote_types(before, after) == after
