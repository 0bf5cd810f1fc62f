"""Tells the search which values will not be kept, before it counts what is, and which need not be, at what price."""

from __future__ import annotations

import operator
from collections.abc import Set
from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.keys import DROPPED, REPEATABLE
from autopar.ir.markers import save
from autopar.ir.program import Program
from autopar.ops.traits import MADE_ANEW
from autopar.recompute.again import saved_value
from autopar.recompute.choices import named


@dataclass(frozen=True)
class MarkDropped:
    """Mark the `save` nodes of what `Recompute` will compute again by `mode`, and, where it `may_choose`, of what it could.

    Reads: PHASE, SOURCE, `save` nodes. Writes: DROPPED, REPEATABLE. Ensures: what is marked can be computed again from what is not.
    """

    mode: str = "auto"
    may_choose: bool = False
    name: str = "mark dropped"

    def apply(self, program: Program) -> Program:
        chosen = named(self.mode, program)
        possible = named("full", program) if self.may_choose and self.mode == "auto" else frozenset[str]()
        if not chosen and not possible:
            return program
        program = program.copy()
        saves = [node for node in program.graph.nodes if node.target is save]
        saved = {_made(saved_value(node)) for node in saves}
        paid: set[Node] = {node for node in program.graph.nodes if node.name in chosen}
        for node in saves:
            value = saved_value(node)
            if value.name in chosen:
                DROPPED[node] = True
            elif {value.name, _made(value).name} <= possible:
                REPEATABLE[node] = tuple(_repeated(_made(value), possible, saved, paid))
        return program


def _made(node: Node) -> Node:
    """The call that makes what `node` shows."""
    while node.target is operator.getitem or node.target in MADE_ANEW:
        node = node.all_input_nodes[0]
    return node


def _repeated(maker: Node, possible: Set[str], saved: Set[Node], paid: set[Node]) -> list[str]:
    """What is done again to have what `maker` makes, from what is saved and what is paid for; `maker` stands last, unless that is."""
    found: list[Node] = []
    pending = [maker]
    while pending:
        node = pending.pop()
        if node in paid:
            continue
        found.append(node)
        paid.add(node)
        read = (_made(operand) for operand in node.all_input_nodes)
        pending += [each for each in read if each.name in possible and each not in saved]
    return [node.name for node in reversed(found)]
