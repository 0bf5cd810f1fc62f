"""A `pinned` node behind each output of a module that the user pinned, which the search then keeps in that sharding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.graph.emit import copy_origin
from autopar.ir.keys import PHASE, SOURCE
from autopar.ir.markers import pinned
from autopar.ir.pattern import matches_module, matches_name
from autopar.ir.program import Program
from autopar.ir.source import module_calls

# A module, and which of its calls.
Call = tuple[str, str]


@dataclass(frozen=True)
class MarkPinned:
    """Give what a module whose path matches one of `patterns` returns a `pinned` node, at each of its calls.

    A module returns its last forward value that is read outside of it. What is computed outside, and the backward, reads the
    node. A pattern that matches a parameter's name speaks of parameters.

    Reads: PHASE, SOURCE. Writes: `pinned` nodes, whose SOURCE names the module. Ensures: values are unchanged.
    """

    patterns: tuple[str, ...] = ()
    name: str = "mark pinned"

    def apply(self, program: Program) -> Program:
        names = [item.name for item in program.signature.inputs_of("parameter")]
        patterns = [pattern for pattern in self.patterns if not any(matches_name(name, pattern) for name in names)]
        if not patterns:
            return program
        program = program.copy()
        found = {call: value for call, value in _outputs(program).items() if any(matches_module(call[0], each) for each in patterns)}
        latest: dict[Node, Node] = {}
        # From the inside out: the output of a block may be that of its last layer, which then is pinned first.
        for call, value in sorted(found.items(), key=lambda entry: -entry[0][0].count(".")):
            latest[value] = _pin(latest.get(value, value), call)
        return program


def _outputs(program: Program) -> dict[Call, Node]:
    """For each call of a module the last forward value that is read outside of it."""
    found: dict[Call, Node] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or PHASE.get(node) == "backward" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        readers = [_calls(user) for user in node.users if user.op == "output" or PHASE.get(user) != "backward"]
        for call in _calls(node):
            if any(call not in calls for calls in readers):
                found[call] = node
    return found


def _calls(node: Node) -> tuple[Call, ...]:
    return () if node.op == "output" else tuple(module_calls(node).items())


def _pin(value: Node, call: Call) -> Node:
    readers = list(_outside(value, call))
    with value.graph.inserting_after(value):
        node = value.graph.call_function(pinned, (value,))
    node.meta["val"] = value.meta["val"]
    copy_origin(value, node)
    SOURCE[node] = replace(SOURCE[value], module=call[0])
    for reader in readers:
        reader.replace_input_with(value, node)
    return node


def _outside(value: Node, call: Call) -> Iterator[Node]:
    """Readers of what `call` returns. The backward reads it as pinned, too: else it might be saved twice."""
    return (user for user in value.users if PHASE.get(user) == "backward" or call not in _calls(user))
