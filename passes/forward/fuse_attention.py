"""Attention, however it is written, becomes one op of ours."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.ir.fusion import FusionDecision, FusionSite, NotFusible
from autopar.ir.program import Program
from autopar.passes.fuse.attention.contractions import is_contraction
from autopar.passes.fuse.attention.match import match_attention, why_not_used
from autopar.passes.fuse.attention.softmax import softmax_at
from autopar.passes.fuse.match import rewritten, site_at


@dataclass(frozen=True)
class FuseAttention:
    """softmax(scale · Q Kᵀ + mask) V in plain ops → `autopar.attention` and its result 0.

    From every product whose operand is a softmax of a product: scales, masks, casts, dropout, layouts and repeated heads are read
    on the way up (`passes/fuse/attention/`), and rewritten only where both compute the same for all values. The decision says
    what was found where, on which conditions, and why a near miss is none.

    Reads: val and the source of nodes of a FORWARD program in which random ops are still ATen's: run it before `KeyRandom`.
    Writes: `autopar.attention` on [B, H, S, D] operands, with dropout one that `KeyRandom` is to draw. With a sink, result 0 times
        sigmoid(result 1 − sink).
    Ensures: what is decided to be fused is; a softmax that is left is no attention, or has its reason in the decision.
    """

    is_asked: bool = True
    name: str = "fuse attention"

    def decide(self, program: Program) -> FusionDecision:
        if not self.is_asked:
            return FusionDecision(())
        constants, found, reached = Constants(program), list[FusionSite](), set[Node]()
        for node in program.graph.nodes:
            if node.op == "call_function" and is_contraction(node):
                site = site_at(node, "attention", lambda product: match_attention(product, constants))
                if site is not None:
                    found.append(site)
                    reached |= _softmaxes_above(node) if site.match is None else site.match.interior
        return FusionDecision((*found, *_unused(program, reached)))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        return rewritten(program, decision.fused)


def _softmaxes_above(product: Node) -> set[Node]:
    """Softmaxes up to the next product above."""
    found, pending = set[Node](), list(product.all_input_nodes)
    while pending:
        node = pending.pop()
        if node.op != "call_function" or node in found or is_contraction(node):
            continue
        found.add(node)
        pending += node.all_input_nodes
    return found


def _unused(program: Program, reached: set[Node]) -> list[FusionSite]:
    found: list[FusionSite] = []
    for node in program.graph.nodes:
        if node.op != "call_function" or node in reached:
            continue
        try:
            softmax = softmax_at(node)
        except NotFusible:
            continue
        reason = why_not_used(node) if softmax is not None else None
        if reason is not None:
            found.append(FusionSite.at(node, "attention", reason=reason))
    return found
