"""Layer norms and RMS norms, however they are written, become ops of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import Found, FusionDecision, Refused
from autopar.ir.program import Program
from autopar.passes.fuse.norm.match import Match, check_writes, match
from autopar.passes.fuse.norm.residual import residual_of
from autopar.passes.fuse.norm.write import write

_INSIDE = "residual added inside"


@dataclass(frozen=True)
class FuseNorms:
    """Layer norm and RMS norm over the last dim → `autopar.norm` and its result 0; of a sum → `autopar.add_norm`.

    From `layer_norm`, `rms_norm`, and every value that is divided by a root of a mean of squares, its own or of what it is minus its
    mean; the weight and bias that follow go inside. The op computes in float32 at least, so of a norm in 16 bits only the last
    rounding is left. A sum of two values of one shape and dtype goes inside where the order of nodes allows; who else reads it
    reads result 1. Where a block ends with a sum and the next begins with its norm, the sum stays outside: it is what the block
    returns, which users pin, and between blocks stages of a pipeline are cut, where two values would cross for one. With
    `across_modules` it goes inside, but where there is a `pp` axis, and no pin finds it any more.

    Reads: val and the source of nodes of a FORWARD program.
    Writes: `autopar.norm`, `autopar.add_norm`; casts where the result is wider than the operand; weights viewed as [N].
    Ensures: what is decided to be fused is. Every `layer_norm`, `rms_norm` and value over a root of a mean of squares that is left has
        its reason in the decision.
    """

    across_modules: bool = False
    name: str = "fuse norms"

    def decide(self, program: Program) -> FusionDecision:
        writers, across = writers_of(program.graph), self._across(program)
        found, sums = list[Found](), set[Node]()
        for start, matched in _matches(program, Constants(program)):
            try:
                if isinstance(matched, Refused):
                    raise matched
                check_writes(matched, writers)
            except Refused as reason:
                found.append(Found.at(start, "norm", reason=str(reason)))
                continue
            inside = matched.x not in sums and residual_of(matched, writers, across) is not None
            sums |= {matched.x} if inside else set()
            found.append(Found.at(matched.end, "norm", (matched.condition(), *((_INSIDE,) if inside else ()))))
        return FusionDecision(tuple(found))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        program = program.copy()
        constants, decided = Constants(program), {each.node: each for each in decision.fused}
        starts = [(start, matched.end.name) for start, matched in _matches(program, constants) if isinstance(matched, Match)]
        for start, end in starts:
            if end not in decided:
                continue
            matched = match(start, constants)  # again: what it reads may have been replaced
            assert matched is not None, end
            residual = None
            if _INSIDE in decided[end].conditions:
                residual = residual_of(matched, writers_of(program.graph), self._across(program))
                assert residual is not None, end
            write(matched, residual)
        if decision.fused:
            program.graph.eliminate_dead_code()
        return program

    def _across(self, program: Program) -> bool:
        return self.across_modules and not program.mesh.parts("pp")


def _matches(program: Program, constants: Constants) -> Iterator[tuple[Node, Match | Refused]]:
    """What there is to say of each node, in order."""
    for node in list(program.graph.nodes):
        try:
            matched = match(node, constants)
        except Refused as reason:
            yield node, reason
            continue
        if matched is not None:
            yield node, matched
