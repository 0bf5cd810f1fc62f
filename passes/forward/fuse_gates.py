"""Gated activations, and activations of a sum with a bias, however they are written, become ops of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.overwrites import writers_of
from autopar.ir.fusion import Found, FusionDecision, Refused
from autopar.ir.program import Program
from autopar.passes.fuse.gate.bias import Biased, match_bias
from autopar.passes.fuse.gate.match import Gate, match_gate
from autopar.passes.fuse.gate.write import write_bias, write_gate

GATE, BIAS = "gate", "biased activation"
_Match = Callable[[Node, Constants, Sequence[Node]], Gate | Biased | None]


@dataclass(frozen=True)
class FuseGates:
    """activation(gate) · up → `autopar.gated`, activation(x + bias) → `autopar.bias_activation`.

    The activation is silu, gelu (exact or by tanh), relu or sigmoid, by name or written by hand; gate and up are what was there
    before they were made wider. Of silu(a) · gelu(b) the first operand gates. An activation, or a sum with a bias, that is read
    elsewhere too stays: it would have to be computed twice, and saved twice, to spare one kernel. So does a bias inside a linear,
    where the product adds it for nothing, and a gate that is broadcast: the op takes gate and up of one shape.

    Reads: val and the source of nodes of a FORWARD program.
    Writes: `autopar.gated`, `autopar.bias_activation`, casts of operands of unequal dtypes, slices for a `glu`.
    Ensures: what is decided to be fused is, and a near miss has its reason in the decision. Programs compute the same values
        and gradients, up to rounding; of an activation in several 16-bit ops only the last rounding is left.
    """

    name: str = "fuse gates"

    def decide(self, program: Program) -> FusionDecision:
        constants, writers = Constants(program), writers_of(program.graph)
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        found, taken = dict[Node, Found](), set[Node]()
        # From below: a product takes all factors that it can. Gates before biases, which are left of their activations.
        for what, match in ((GATE, match_gate), (BIAS, match_bias)):
            for node in reversed(nodes):
                if node not in taken:
                    _look(node, what, match, constants, writers, found, taken)
        return FusionDecision(tuple(found[node] for node in nodes if node in found))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        program = program.copy()
        constants = Constants(program)
        for each in reversed(decision.fused):
            node = program.node(each.node)
            # Whether something is written in place was looked at when it was decided.
            if each.what == GATE:
                gate = match_gate(node, constants, ())
                assert gate is not None, each
                write_gate(gate)
            else:
                biased = match_bias(node, constants, ())
                assert biased is not None, each
                write_bias(biased)
        if decision.fused:
            program.graph.eliminate_dead_code()
        return program


def _look(
    node: Node, what: str, match: _Match, constants: Constants, writers: Sequence[Node], found: dict[Node, Found], taken: set[Node]
) -> None:
    """Note what there is to say of `node`, if anything, and what the match takes."""
    try:
        matched = match(node, constants, writers)
    except Refused as reason:
        found.setdefault(node, Found.at(node, what, reason=str(reason)))
        return
    if matched is not None and taken.isdisjoint(matched.interior | {matched.root}):
        found[node] = Found.at(node, what, matched.conditions())
        taken |= matched.interior | {matched.root, node}
