"""Pointwise ops: every dim of the result has the label of the operands' dims that are broadcast to it.

All overloads that torch tags `pointwise` have the rule; the tables say where an op is linear.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.program import operands, results_of
from autopar.ops.rule import Rule, rule, rule_for_tag
from autopar.ops.rules.labels import aten, broadcast, is_zero, positional, shape_of
from autopar.ops.traits import rounds

# Positions of the arguments in which an op is linear, one alone.
_SINGLY: dict[str, tuple[int, ...]] = {
    "aten.neg.default": (0,),
    "aten.positive.default": (0,),
    "aten.clone.default": (0,),
    "aten.alias.default": (0,),
    "aten.detach.default": (0,),
    "aten.lift_fresh_copy.default": (0,),
    "aten._to_copy.default": (0,),
    "aten._conj.default": (0,),
    "aten._conj_physical.default": (0,),
    "aten._neg_view.default": (0,),
    "aten.resolve_conj.default": (0,),
    "aten.resolve_neg.default": (0,),
    "prims.convert_element_type.default": (0,),
    "aten.mul.Tensor": (0, 1),
    "aten.mul.Scalar": (0,),
    "aten.div.Tensor": (0,),
    "aten.div.Scalar": (0,),
    "aten.ldexp.Tensor": (0,),
    "aten.deg2rad.default": (0,),
    "aten.rad2deg.default": (0,),
    "aten.zeros_like.default": (0,),
    "aten.copy.default": (1,),
    # Backward formulas are linear in the gradient that comes in.
    "aten.gelu_backward.default": (0,),
    "aten.silu_backward.default": (0,),
    "aten.tanh_backward.default": (0,),
    "aten.sigmoid_backward.default": (0,),
    "aten.threshold_backward.default": (0,),
    "aten.leaky_relu_backward.default": (0,),
    "aten.elu_backward.default": (0,),
    "aten.hardtanh_backward.default": (0,),
    "aten.hardswish_backward.default": (0,),
    "aten.hardsigmoid_backward.default": (0,),
    "aten.softplus_backward.default": (0,),
    "aten.mish_backward.default": (0,),
    "aten.log_sigmoid_backward.default": (0,),
    "aten.logit_backward.default": (0,),
}
# Positions of the arguments in which an op is linear together; a number among them must be 0.
_JOINTLY: dict[str, tuple[tuple[int, ...], ...]] = {
    "aten.add.Tensor": ((0, 1),),
    "aten.add.Scalar": ((0, 1),),
    "aten.sub.Tensor": ((0, 1),),
    "aten.sub.Scalar": ((0, 1),),
    "aten.rsub.Tensor": ((0, 1),),
    "aten.rsub.Scalar": ((0, 1),),
    "aten.where.self": ((1, 2),),
    "aten.where.ScalarOther": ((1, 2),),
    "aten.where.ScalarSelf": ((1, 2),),
    "aten.masked_fill.Scalar": ((0, 2),),
    "aten.masked_fill.Tensor": ((0, 2),),
    "aten.addcmul.default": ((0, 1), (0, 2)),
    "aten.addcdiv.default": ((0, 1),),
    "aten.lerp.Scalar": ((0, 1),),
    "aten.lerp.Tensor": ((0, 1),),
    "aten.copy.default": ((0, 1),),  # nobody reads what is written over
}
_CASTS = ("aten._to_copy.default", "aten.copy.default", "prims.convert_element_type.default")
# Ops that are pointwise without the tag.
_UNTAGGED = (
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.copy.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.softplus_backward.default,
    "prims.convert_element_type.default",
    aten.rsub.Tensor,
    aten.floor_divide.default,
    aten.masked_fill.Tensor,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.complex.default,
    aten.polar.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.leaky_relu_backward.default,
    aten.log_sigmoid_backward.default,
    aten.elu_backward.default,
    aten.mish_backward.default,
    aten._prelu_kernel.default,
    aten._conj.default,
    aten._neg_view.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)


@rule_for_tag(torch.Tag.pointwise)
@rule(*_UNTAGGED)
def pointwise(node: Node) -> Rule | None:
    """Labels by broadcasting; None for ops that draw random numbers or have several results."""
    tags = getattr(node.target, "tags", ())
    if len(results_of(node)) != 1 or torch.Tag.nondeterministic_seeded in tags:
        return None
    result = shape_of(node)
    shapes = [shape_of(operand) for operand in operands(node)]
    if shapes and tuple(torch.broadcast_shapes(*shapes)) != result:
        return None
    return Rule(tuple(broadcast(shape, result) for shape in shapes), (positional(len(result)),), linear=_linear(node))


def _linear(node: Node) -> tuple[frozenset[int], ...]:
    name = str(node.target)
    if name in _CASTS and rounds(node):
        return ()
    singly = [_operand_at(node, index) for index in _SINGLY.get(name, ())]
    jointly = [group for indices in _JOINTLY.get(name, ()) for group in _joint(node, indices)]
    return tuple(dict.fromkeys(group for group in (*singly, *jointly) if group))


def _operand_at(node: Node, index: int) -> frozenset[int]:
    """The position among the operands of the argument at `index`; `mul(x, x)` has two."""
    if not isinstance(node.args[index], Node):
        return frozenset()
    return frozenset({sum(isinstance(other, Node) for other in node.args[:index])})


def _joint(node: Node, indices: tuple[int, ...]) -> list[frozenset[int]]:
    """All of the arguments together, and each alone beside which the others are zero."""
    groups: list[frozenset[int]] = []
    if all(isinstance(node.args[i], Node) or is_zero(node.args[i]) for i in indices):
        groups.append(frozenset[int]().union(*(_operand_at(node, i) for i in indices)))
    for index in indices:
        if all(is_zero(node.args[i]) for i in indices if i != index):
            groups.append(_operand_at(node, index))
    return groups
