"""Ops that make tensors from numbers: any dim may be split, every rank makes its own part."""

from __future__ import annotations

from torch.fx import Node

from autopar.ops.rule import Rule, rule
from autopar.ops.rules.labels import aten, blocked, positional, shape_of, value_of


@rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.scalar_tensor.default,
    aten.empty.memory_format,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
)
def creation(node: Node) -> Rule:
    return Rule((), (positional(len(shape_of(node))),))


@rule(aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_empty_strided.default)
def creation_beside(node: Node) -> Rule | None:
    """The operand gives no more than dtype and device, yet is asked for whole: `full` is cheaper. None for strides of one's own."""
    if node.target is aten.new_empty_strided.default and not value_of(node).is_contiguous():
        return None
    return Rule((blocked(len(shape_of(node.args[0]))),), (positional(len(shape_of(node))),))
