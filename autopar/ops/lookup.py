"""The rule of a node: the one registered for its op, or else one found by running it.

A module of its own, because the rules and the probing, which it imports, import `autopar.ops.rule` themselves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

import autopar.ops.rules  # noqa: F401  # pyright: ignore[reportUnusedImport]  (it registers the rules)
from autopar.ir.program import operands, results_of
from autopar.ops.probing.probe import infer
from autopar.ops.rule import RULES, TAG_RULES, Rule, RuleFunction
from autopar.ops.rules.ours import rule_of_ours


def registered_rule(node: Node) -> Rule | None:
    """The rule of `node` where one is registered; nothing is run to find one."""
    function = RULES.get(node.target) or RULES.get(str(node.target)) or _tag_rule(node.target)
    return function(node) if function else rule_of_ours(node)


def rule_of(node: Node) -> Rule | None:
    """The rule of `node`: registered, or inferred. None for an op without one (it runs replicated, and `summary()` names it)."""
    found = registered_rule(node)
    if found is None:
        found = infer(node)
    if found is None:
        return None
    assert len(found.operands) == len(operands(node)), (node.format_node(), found)
    assert len(found.results) == len(results_of(node)), (node.format_node(), found)
    linear = tuple(group for group in found.linear if group and _summable(node, group))
    return found if linear == found.linear else replace(found, linear=linear)


def is_contraction(node: Node) -> bool:
    """Whether `node` multiplies matrices, convolves or attends."""
    rule = rule_of(node)
    return rule is not None and rule.flops > 0


def _tag_rule(target: object) -> RuleFunction | None:
    tags = getattr(target, "tags", ())
    return next((function for tag, function in TAG_RULES.items() if tag in tags), None)


def _summable(node: Node, group: frozenset[int]) -> bool:
    """Whether dtypes let sums pass: no booleans, and no rounding of floats to integers."""
    inputs = operands(node)
    sources = [value for index in group for value in results_of(inputs[index]) if value is not None]
    results = [value for value in results_of(node) if value is not None]
    if any(value.dtype == torch.bool for value in (*sources, *results)):
        return False
    rounded = any(not value.dtype.is_floating_point and not value.dtype.is_complex for value in results)
    return not (rounded and any(value.dtype.is_floating_point or value.dtype.is_complex for value in sources))
