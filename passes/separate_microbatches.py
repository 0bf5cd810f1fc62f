"""A LOCAL program in which microbatches meet only before the first and after the last of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.collectives import all_reduce, is_launch, wait
from autopar.emit import Emitter
from autopar.errors import PlanError
from autopar.keys import DIMS, ORIGIN, SHARDING, SOURCE
from autopar.mesh import MICROBATCHES
from autopar.microbatches import is_summed_later, known_ahead, summed_later
from autopar.program import Output, Program

logger = logging.getLogger("autopar")
aten = torch.ops.aten


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
        ahead = known_ahead(program)
        mixing = []
        for node in list(program.graph.nodes):
            if is_launch(node) and MICROBATCHES in node.args[1] and node not in ahead:
                mixing.append(self._estimate(node, program, number))
        if mixing:
            logger.warning(
                "%d values mix microbatches; each of the %d microbatches takes its own (batch norm: its own statistics): %s",
                len(mixing),
                number,
                "; ".join(dict.fromkeys(mixing)),
            )
        return self._averaged(program, number)

    def _estimate(self, launch: Node, program: Program, number: int) -> str:
        (completed,) = launch.users
        place = SOURCE.get(launch)
        if launch.target is not all_reduce or launch.args[1] != (MICROBATCHES,):
            raise PlanError(
                f"{place}: the value of {ORIGIN.get(completed, launch.name)!r} joins samples of different microbatches in a way that a "
                f"microbatch cannot estimate ({launch.target.__name__} over {MICROBATCHES}); use num_microbatches=1"  # type: ignore[union-attr]
            )
        operand, _, kind = launch.args
        assert isinstance(operand, Node) and completed.target is wait
        own = Emitter(program.graph, launch).call(aten.mul.Tensor, operand, number) if kind == "sum" else operand
        if own is not operand:
            for key in (ORIGIN, DIMS, SHARDING):
                if completed in key:
                    key[own] = key[completed]  # type: ignore[literal-required]
        completed.replace_all_uses_with(own)
        program.graph.erase_node(completed)
        program.graph.erase_node(launch)
        return str(place)

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
