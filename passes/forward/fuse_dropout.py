"""Dropout and the sum with a residual become one op of ours, which draws its mask itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import Found, FusionDecision, Refused
from autopar.ir.program import Program
from autopar.passes.fuse.dropout.match import SUMS, Dropped, match_alone, match_sum
from autopar.passes.fuse.dropout.write import write

DROPOUT = "dropout"


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

    name: str = "fuse dropout"

    def decide(self, program: Program) -> FusionDecision:
        return FusionDecision(tuple(_found(program)))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        program = program.copy()
        for each in decision.fused:
            node = program.node(each.node)
            # Whether something is written in place was looked at when it was decided.
            matched = _match(node, ())
            assert matched is not None, each
            write(matched)
        if decision.fused:
            program.graph.eliminate_dead_code()
        return program


def _found(program: Program) -> Iterator[Found]:
    """What there is to say of each node, in order."""
    writers, taken = writers_of(program.graph), set[Node]()
    for node in program.graph.nodes:
        try:
            matched = _match(node, writers)
        except Refused as reason:
            yield Found.at(node, DROPOUT, reason=str(reason))
            continue
        if matched is not None and taken.isdisjoint(matched.interior):
            taken |= matched.interior
            yield Found.at(node, DROPOUT, matched.conditions())


def _match(node: Node, writers: tuple[Node, ...]) -> Dropped | None:
    return match_sum(node, writers) if node.target in SUMS else match_alone(node, writers)
