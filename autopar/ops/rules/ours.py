"""Sharding rules of our own ops, from the labels that are registered with their kernels (`autopar/kernels/registration.py`)."""

from __future__ import annotations

from torch.fx import Node

from autopar.ir.arguments import arguments
from autopar.kernels.registration import OURS, OpTraits
from autopar.ops.rule import Rule
from autopar.ops.rules.labels import shape_of


def traits_of(node: Node) -> OpTraits | None:
    """What an op of ours says of itself; None for any other."""
    return OURS.get(str(node.target))


def rule_of_ours(node: Node) -> Rule | None:
    """The rule of a call of an op of ours: what its arguments' shapes and its options make of it, without the arguments that are None."""
    traits = traits_of(node)
    if traits is None:
        return None
    given = arguments(node)
    found = traits.rule(*(shape_of(each) if isinstance(each, Node) else None for each in given), **node.kwargs)
    operands = [place for place, each in enumerate(given) if isinstance(each, Node)]
    return Rule(
        tuple(found.arguments[place] for place in operands),
        found.results,
        blocked=found.blocked,
        reductions=found.reductions,
        linear=tuple(frozenset(operands.index(place) for place in group if place in operands) for group in found.linear),
        flops=found.flops,
        sizes=dict(found.sizes),
    )
