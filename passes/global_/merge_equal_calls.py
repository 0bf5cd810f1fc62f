"""Common subexpressions: equal calls on equal operands become one node.

Identical views of q, k and v would otherwise be three values, each gathered on its own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import OpOverload, writes_operands
from autopar.ir.keys import PHASE
from autopar.ir.markers import save
from autopar.ir.program import Program


@dataclass(frozen=True)
class MergeEqualCalls:
    """Merge equal calls of one phase: what the backward computes anew is not kept alive for it by the forward.

    Reads: PHASE. Writes: nothing. Ensures: no two calls of one phase are equal; values are unchanged.
    """

    name: str = "merge equal calls"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        seen: dict[Any, Node] = {}
        for node in list(program.graph.nodes):
            if node.op != "call_function" or not _is_pure(node):
                continue
            key = (node.target, PHASE.get(node), _frozen(node.args), _frozen(node.kwargs))
            if key in seen:
                node.replace_all_uses_with(seen[key])
                program.graph.erase_node(node)
            else:
                seen[key] = node
        return program


def _is_pure(node: Node) -> bool:
    target = node.target
    if target is operator.getitem or target is save:
        return True
    return isinstance(target, OpOverload) and not writes_operands(target) and torch.Tag.nondeterministic_seeded not in target.tags


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _frozen(item)) for key, item in value.items()))
    # 0.0 == -0.0, and their reciprocals differ.
    return value if isinstance(value, Node) else (type(value), repr(value) if isinstance(value, (float, complex)) else value)
