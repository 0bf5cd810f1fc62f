"""Layer norms and RMS norms, however they are written, become ops of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import FusionDecision
from autopar.ir.program import Program
from autopar.passes.fuse.match import rewritten, site_at
from autopar.passes.fuse.norm.match import Norm, is_within_module, match_norm, residual_of


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
    is_asked: bool = True
    name: str = "fuse norms"

    def decide(self, program: Program) -> FusionDecision:
        if not self.is_asked:
            return FusionDecision(())
        constants, writers, sums = Constants(program), writers_of(program.graph), set[Node]()
        across = self.across_modules and not program.mesh.parts("pp")

        def match(node: Node) -> Norm | None:
            found = match_norm(node, constants, writers)
            # A sum can be computed inside one norm only.
            if found is None or found.x in sums or not (across or is_within_module(found)) or residual_of(found, writers) is None:
                return found
            sums.add(found.x)
            return replace(found, adds_residual=True)

        sites = [site_at(node, "norm", match, at_root=True) for node in program.graph.nodes]
        return FusionDecision(tuple(site for site in sites if site is not None))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        return rewritten(program, decision.fused)
