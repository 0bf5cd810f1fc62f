"""Gated activations, and activations of a sum with a bias, however they are written, become ops of ours; others one op."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import FusionDecision, FusionSite
from autopar.ir.program import Program
from autopar.passes.fuse.gate.match import match_bias, match_gate, match_written
from autopar.passes.fuse.match import look_at, rewritten


@dataclass(frozen=True)
class FuseGates:
    """activation(gate) · up → `autopar.gated`, activation(x + bias) → `autopar.bias_activation`; silu and gelu by hand → `aten`'s.

    The activation is silu, gelu (exact or by tanh), relu or sigmoid, by name or written by hand; gate and up are what was there
    before they were made wider. Of silu(a) · gelu(b) the first operand gates. An activation, or a sum with a bias, that is read
    elsewhere too stays: it would have to be computed twice, and saved twice, to spare one kernel. So does a bias inside a linear,
    where the product adds it for nothing, and a gate that is broadcast: the op takes gate and up of one shape. An activation by itself that
    is written in several ops saves an operand of each: one op saves one, so it is written also where ops of ours are not asked for.

    Reads: val and the source of nodes of a FORWARD program.
    Writes: `autopar.gated`, `autopar.bias_activation`, casts of operands of unequal dtypes, slices for a `glu`.
    Ensures: what is decided to be fused is, and a near miss has its reason in the decision. Programs compute the same values
        and gradients, up to rounding; of an activation in several 16-bit ops only the last rounding is left.
    """

    is_asked: bool = True
    joins_written: bool = True
    name: str = "fuse gates"

    def decide(self, program: Program) -> FusionDecision:
        if not self.is_asked and not self.joins_written:
            return FusionDecision(())
        constants, writers = Constants(program), writers_of(program.graph)
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        found, taken = dict[Node, FusionSite](), set[Node]()
        # Gates before biases, which are left of their activations.
        if self.is_asked:
            look_at(reversed(nodes), "gate", lambda node: match_gate(node, constants, writers), found, taken)
            look_at(reversed(nodes), "biased activation", lambda node: match_bias(node, constants, writers), found, taken)
        if self.joins_written:
            look_at(reversed(nodes), "activation", lambda node: match_written(node, constants, writers), found, taken)
        return FusionDecision(tuple(found[node] for node in nodes if node in found))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        return rewritten(program, reversed(decision.fused))
