"""A LOCAL program in which microbatches meet only before the first and after the last of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.collectives import all_reduce, wait
from autopar.emit import Emitter
from autopar.errors import PlanError
from autopar.keys import DIMS, ORIGIN, SHARDING, SOURCE
from autopar.mesh import MICROBATCHES
from autopar.microbatches import is_summed_later, known_ahead, mixing, summed_later
from autopar.program import Output, Program
from autopar.reports.printing import op_name

logger = logging.getLogger("autopar")
aten = torch.ops.aten

# So many places are named in the warning.
_SHOWN = 4


@dataclass(frozen=True)
class SeparateMicrobatches:
    """Let each microbatch take its own estimate of what joins several of them, and its part of what all have alike.

    A sum over the microbatches becomes the microbatch's own sum times their number, a maximum its own maximum: batch norm
    then normalises by the statistics of the microbatch. Each one is a warning. What is known ahead stays a sum. A loss or
    gradient that is not a sum over the microbatches is their mean.

    Reads: SHARDING. Writes: plain ops in place of collectives over `mb`. Ensures: none is left but on values known ahead.
    """

    name: str = "separate microbatches"

    def apply(self, program: Program) -> Program:
        number = program.mesh.num_microbatches
        if number == 1:
            return program
        program = program.copy()
        places = [_estimate(node, program, number) for node in mixing(program)]
        if places:
            first = list(dict.fromkeys(places))
            more = f"; and {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
            logger.warning(
                "%d values mix microbatches; each of the %d microbatches takes its own (batch norm: its own statistics): %s%s",
                len(places),
                number,
                "; ".join(first[:_SHOWN]),
                more,
            )
        return self._averaged(program, number)

    def _averaged(self, program: Program, number: int) -> Program:
        """Losses and gradients that all microbatches have alike become sums of equal parts."""
        ahead = known_ahead(program)
        outputs: list[Output] = []
        results = list(program.results)
        for index, (output, node) in enumerate(program.named_outputs()):
            assert output.sharding is not None, output
            if output.kind in ("loss", "gradient") and not is_summed_later(output.sharding) and node not in ahead:
                part = Emitter(program.graph, program.graph.output_node(), node).call(aten.mul.Tensor, node, 1 / number)
                DIMS[part], SHARDING[part] = (output.dims,), (summed_later(output.sharding),)
                results[index], output = part, replace(output, sharding=summed_later(output.sharding))
            outputs.append(output)
        program.graph.output_node().args = (tuple(results),)
        return replace(program, signature=replace(program.signature, outputs=tuple(outputs)))


def _estimate(launch: Node, program: Program, number: int) -> str:
    """Replace a collective over the microbatches by what one of them makes of it; returns where the user wrote it."""
    (completed,) = launch.users
    operand, kind, place = launch.args[0], launch.args[-1], str(SOURCE.get(launch))
    if launch.target is not all_reduce or launch.args[1] != (MICROBATCHES,):
        raise PlanError(
            f"{place}: this op needs all samples of the batch at once ({op_name(launch.target)} over {number} microbatches), and no "
            "microbatch can make up its part alone; use num_microbatches=1"
        )
    assert isinstance(operand, Node) and completed.target is wait
    own = operand
    if kind == "sum":
        own = Emitter(program.graph, launch).call(aten.mul.Tensor, operand, number)
        ORIGIN[own], DIMS[own], SHARDING[own] = ORIGIN[completed], DIMS[completed], SHARDING[completed]
    completed.replace_all_uses_with(own)
    program.graph.erase_node(completed)
    program.graph.erase_node(launch)
    return place
