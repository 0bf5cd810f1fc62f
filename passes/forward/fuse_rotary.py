"""Rotary position embeddings, however they are written, become one op of ours."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.differentiable import differentiable
from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import FusionDecision, FusionSite
from autopar.ir.program import Program
from autopar.passes.fuse.match import look_at, rewritten
from autopar.passes.fuse.rotary.elements import is_understood
from autopar.passes.fuse.rotary.match import match_rotary


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

    is_asked: bool = True
    name: str = "fuse rotary"

    def decide(self, program: Program) -> FusionDecision:
        if not self.is_asked:
            return FusionDecision(())
        constants, writers, trained = Constants(program), writers_of(program.graph), differentiable(program)
        found, taken = dict[Node, FusionSite](), set[Node]()
        # What is passed by a partial rotation joins it last.
        nodes = reversed(program.graph.nodes)
        look_at(nodes, "rotary embedding", lambda node: match_rotary(node, constants, writers, trained), found, taken)
        return FusionDecision(tuple(found[node] for node in program.graph.nodes if node in found and not _is_part(node, found)))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        return rewritten(program, reversed(decision.fused))


def _is_part(node: Node, found: dict[Node, FusionSite]) -> bool:
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
