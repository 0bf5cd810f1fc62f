"""Dropout and the sum with a residual become one op of ours, which draws its mask itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import FusionDecision, FusionSite
from autopar.ir.program import Program
from autopar.passes.fuse.dropout.match import match_dropout
from autopar.passes.fuse.match import look_at, rewritten


@dataclass(frozen=True)
class FuseDropout:
    """residual + x · mask · scale → `autopar.add_dropout`; x · mask · scale that `autopar.add_norm` alone reads → `autopar.dropout`.

    After `KeyRandom`, whose draws the ops repeat bit for bit: sites keep their numbers, and `verify` compares with the plain program.
    After `FuseNorms`, and it leaves the sums to that one: in 16 bits dropout, sum and norm, forward and backward, move 24 bytes an
    element as `dropout` and `add_norm`, 26 as `add_dropout` and `norm` (whose gradients are added by one more op), and 26 and a mask
    held as a plain dropout and `add_norm`. Any other dropout stays: compilers join it with its neighbours.

    Reads: val and the source of nodes of a FORWARD program.
    Writes: `autopar.add_dropout`, `autopar.dropout`; x in the dtype in which it is added; views where a view is between.
    Ensures: what is decided to be fused is, and a near miss has its reason in the decision. Masks are the same bit for bit; of
        values in 16 bits the last rounding alone is left.
    """

    is_asked: bool = True
    name: str = "fuse dropout"

    def decide(self, program: Program) -> FusionDecision:
        if not self.is_asked:
            return FusionDecision(())
        writers, found = writers_of(program.graph), dict[Node, FusionSite]()
        look_at(program.graph.nodes, "dropout", lambda node: match_dropout(node, writers), found, set())
        return FusionDecision(tuple(found.values()))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        return rewritten(program, decision.fused)
