"""In a pipeline the backward starts inside the call: from the loss, and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.errors import CaptureError
from autopar.graph.differentiable import differentiable
from autopar.graph.emit import Emitter
from autopar.graph.overwrites import memory_of
from autopar.ir.program import Output, Program

aten = torch.ops.aten


@dataclass(frozen=True)
class DetachOutputs:
    """Let no gradient come back through the outputs beside the loss. One microbatch through one stage has none detached.

    Reads: a FORWARD program. Writes: `detach` on its outputs, and in the signature which of them had gradients. Ensures: with
    `training`, the loss alone is differentiated.
    Raises `CaptureError` where there is no loss, and an output is made of what trains.
    """

    training: bool = True
    name: str = "detach outputs"

    def apply(self, program: Program) -> Program:
        if program.order.is_single or not self.training:
            return program
        program = program.copy()
        trained = differentiable(program)
        if not program.signature.outputs_of("loss") and any(_is_made_of(node, trained) for node in program.results):
            raise CaptureError(
                "several microbatches or pipeline stages run their backward inside the call, which needs a loss to start from, and this "
                f"model returns {_instead(program)}, or use pp = 1 and num_microbatches=1"
            )
        results: list[Node] = []
        outputs: list[Output] = []
        for output, node in program.named_outputs():
            emit = Emitter(program.graph, program.graph.output_node(), node)
            results.append(emit.call(aten.detach.default, node) if output.kind == "output" else node)
            is_loss, is_detached = output.kind == "loss", output.kind == "output" and _is_made_of(node, trained)
            outputs.append(replace(output, requires_grad=output.requires_grad and is_loss, is_detached=is_detached))
        program.graph.output_node().args = (tuple(results),)
        return replace(program, signature=replace(program.signature, outputs=tuple(outputs)))


def _is_made_of(node: Node, trained: set[Node]) -> bool:
    """Whether an output is among what trains, or shows memory that such was written into."""
    return node in trained or memory_of(node) in trained


def _instead(program: Program) -> str:
    """What the model returns in place of one loss, and what would be one."""
    outputs = program.signature.outputs_of("output")
    scalars = [item.name for item in outputs if item.shape == () and item.dtype.is_floating_point]
    if len(scalars) < 2:
        return "none: let it return a scalar or .loss"
    places = f"{', '.join(scalars[:-1])} and {scalars[-1]}"
    return f'{len(scalars)} scalars (outputs {places}), of which none is called loss: let it return {{"loss": ...}} or an object with .loss'
