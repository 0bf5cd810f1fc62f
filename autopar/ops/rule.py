"""Sharding rules: the iteration space of an op, as einsum-like labels of dims, and the operands in which it is linear.

A rule labels every dim of every operand and result, as einsum does: `mm` is "mk,kn->mn". Dims
with equal labels are one index of the op, so they share atoms and may be split together. A result that
lacks a label which an operand has is reduced over it: splitting the label leaves that result
unreduced. An operand that lacks a label is needed whole. `None` marks a dim that cannot be split
(or has size 1). A dim may carry several labels, major first: the query heads of grouped attention
are ("g", "r"), its key heads "g".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autopar.ir.sharding import ReductionKind

Label = str | tuple[str, ...] | None
Labels = tuple[Label, ...]


@dataclass(frozen=True)
class Rule:
    """The rule of one op *instance* (whether an op is linear depends on its arguments).

    operands, results  labels per dim, one entry per tensor operand (see `program.operands`) and per result (`()` for None)
    blocked            labels whose dims share atoms but may not be split: the length a softmax runs along
    reductions         how results that lack a label are reduced over it, all alike or one by one; "sum" when not named
    linear             sets of operands in which the op is jointly linear: if just those are unreduced sums,
                       the results are unreduced sums. `add(x, y)` has {0, 1}; `mul(x, y)` has {0} and {1}
    view               the op reorders nothing: its atoms are its operand's atoms in the same order; labels are ignored
    flops              floating-point operations on the logical shapes: contractions and convolutions only
    sizes              the sizes of labels that stand together on one dim
    inferred           found by running the op (`autopar.ops.probing.probe`), not written by hand
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    blocked: frozenset[str] = frozenset()
    reductions: Mapping[str, ReductionKind | tuple[ReductionKind, ...]] = field(default_factory=dict[str, ReductionKind])
    linear: tuple[frozenset[int], ...] = ()
    view: bool = False
    flops: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    inferred: bool = False


RuleFunction = Callable[[Node], Rule | None]
RULES: dict[object, RuleFunction] = {}
TAG_RULES: dict[torch.Tag, RuleFunction] = {}


def rule(*targets: object) -> Callable[[RuleFunction], RuleFunction]:
    """Register the rule of one or several op overloads.

    A target is the overload, or its printed name ("aten.add.Tensor") for an op that some versions lack or that is
    registered elsewhere. The function returns None for an instance it has no rule for.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for target in targets:
            assert target not in RULES and str(target) not in RULES, f"{target} has a rule already"
            RULES[target] = function
        return function

    return register


def rule_for_tag(tag: torch.Tag) -> Callable[[RuleFunction], RuleFunction]:
    """Register the rule of all overloads that carry `tag` and have no rule of their own."""

    def register(function: RuleFunction) -> RuleFunction:
        assert tag not in TAG_RULES, f"{tag} has a rule already"
        TAG_RULES[tag] = function
        return function

    return register
