"""A `save` node behind each forward value that the backward reads, so that the search decides in which sharding it is kept."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import copy_origin
from autopar.ir.keys import PHASE
from autopar.ir.markers import save
from autopar.ir.program import Program, results_of
from autopar.ops.traits import MADE_ANEW

aten = torch.ops.aten


@dataclass(frozen=True)
class MarkSaved:
    """Give each value that the forward makes and the backward reads one `save` node, and let the backward read that.

    Views are made anew by the backward, so that a value and its views are saved once. Inputs are there all step
    long and are read as they lie.

    Reads: PHASE. Writes: `save` nodes, views with PHASE. Ensures: the backward reads of the forward only inputs and `save` nodes.
    """

    name: str = "mark saved"

    def apply(self, program: Program) -> Program:
        marking = _Marking(program.copy())
        for node in list(marking.program.graph.nodes):
            if node.op == "call_function" and PHASE.get(node) == "backward":
                marking.redirect(node)
        remove_dead_code(marking.program.graph)
        return marking.program


@dataclass
class _Marking:
    program: Program
    _saved: dict[Node, Node] = field(default_factory=dict[Node, Node])
    _views: dict[Node, Node] = field(default_factory=dict[Node, Node])

    def redirect(self, node: Node) -> None:
        """Let a backward node read what is saved. A result that the backward picks from a forward op is the forward's."""
        if node.target is operator.getitem and _is_forward(node.args[0]):
            source = node.args[0]
            assert isinstance(source, Node)
            source.append(node)
            PHASE[node] = "forward"
            return
        for operand in dict.fromkeys(node.all_input_nodes):
            if _is_forward(operand):
                node.replace_input_with(operand, self._kept(operand, node))

    def _kept(self, value: Node, user: Node) -> Node:
        """`value` as the backward has it: saved, or a view of what is, in front of its first `user`."""
        if value.target in MADE_ANEW:
            if value not in self._views:
                source = value.args[0]
                assert isinstance(source, Node)
                kept = source if source.op == "placeholder" else self._kept(source, user)
                with self.program.graph.inserting_before(user):
                    view = self.program.graph.node_copy(value, lambda operand: kept if operand is source else operand)
                PHASE[view] = "backward"
                self._views[value] = view
            return self._views[value]
        if value not in self._saved:
            assert len(results_of(value)) == 1, f"{value} has several results; getitem names one before it is saved"
            with self.program.graph.inserting_after(value):
                saved = self.program.graph.call_function(save, (value,))
            saved.meta["val"] = value.meta["val"]
            copy_origin(value, saved)
            PHASE[saved] = "forward"
            self._saved[value] = saved
        return self._saved[value]


def _is_forward(node: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and PHASE.get(node) == "forward"
