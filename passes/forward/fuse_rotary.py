"""Rotary position embeddings, however they are written, become one op of ours."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.differentiable import differentiable
from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import Found, FusionDecision, Refused
from autopar.ir.program import Program
from autopar.passes.fuse.rotary.elements import is_understood
from autopar.passes.fuse.rotary.match import match_rotary
from autopar.passes.fuse.rotary.write import write


@dataclass(frozen=True)
class FuseRotary:
    """x · cos + turned(x) · sin → `autopar.rotary`.

    Read are slices, chunks, stacks, views, signs, products and sums, element by element of the last dim: by halves or by pairs,
    of whole heads or of a part, on [B, H, S, D] or [B, S, H, D], with angles for each element or each pair, in a wider dtype or
    not. A rotation by negative angles gets the negative sines. The op gives no gradients of cosines and sines, so they must need none.

    Reads: val and the source of nodes of a FORWARD program.
    Writes: `autopar.rotary`, and what brings x and the angles into the shapes that it takes.
    Ensures: what is decided to be fused is, and a near miss has its reason in the decision.
    """

    name: str = "fuse rotary"

    def decide(self, program: Program) -> FusionDecision:
        constants, writers, trained = Constants(program), writers_of(program.graph), differentiable(program)
        found, taken = dict[Node, Found](), set[Node]()
        # From below: what is passed by a partial rotation joins it last.
        for node in reversed(program.graph.nodes):
            if node in taken:
                continue
            try:
                matched = match_rotary(node, constants, writers, trained)
            except Refused as reason:
                found[node] = Found.at(node, "rotary embedding", reason=str(reason))
                continue
            if matched is not None and taken.isdisjoint({*matched.interior, matched.root}):
                found[node] = Found.at(node, "rotary embedding", matched.conditions())
                taken |= {*matched.interior, matched.root}
        return FusionDecision(tuple(found[node] for node in program.graph.nodes if node in found and not _is_part(node, found)))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        program = program.copy()
        constants = Constants(program)
        for each in reversed(decision.fused):
            # Gradients, and what is written in place, were looked at when it was decided.
            matched = match_rotary(program.node(each.node), constants, (), frozenset())
            assert matched is not None, each
            write(matched)
        if decision.fused:
            program.graph.eliminate_dead_code()
        return program


def _is_part(node: Node, found: dict[Node, Found]) -> bool:
    """Whether `node` was refused and something was found above it, of which it is only the view or the rest."""
    if found[node].fused:
        return False
    seen, pending = set[Node](), list(node.all_input_nodes)
    while pending:
        current = pending.pop()
        if current in found:
            return True
        if current not in seen and is_understood(current):
            seen.add(current)
            pending += current.all_input_nodes
    return False
