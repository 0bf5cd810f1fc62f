"""Gradients leave the backward in the dtype in which they are held until the update.

g16 → f32, summed over ranks → results            grad=float32
g16, summed over ranks → results                  grad=float16
g16 → f32, summed over ranks → f16 → results      grad=float16, reduce=float32
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, tensor_of
from autopar.ir.arguments import node_at
from autopar.ir.program import Program
from autopar.pipeline.stage_rules import held_in

aten = torch.ops.aten


@dataclass(frozen=True)
class HoldGradients:
    """Cast what the backward gives for each parameter to `MixedPrecision.grad`, behind the dtype in which ranks sum it.

    Reads: `precision` of the program. Writes: casts, the dtypes of gradients in the signature. Ensures: gradients have the dtype that
    was asked for, and without `precision` that of their parameter.
    """

    name: str = "hold gradients"

    def apply(self, program: Program) -> Program:
        dtype = held_in(program)
        if dtype is None:
            return program
        program = program.copy()
        results, outputs = list[Node](), []
        for output, node in program.named_outputs():
            if output.kind == "gradient" and output.dtype == torch.float32:
                # Where ranks sum in this dtype, too, a cast to float32 and back would only make room for another.
                source = _uncast(node, dtype) if program.reduce == dtype else node
                node = Emitter(program.graph, program.graph.output_node(), node).cast(source, dtype)
                output = replace(output, dtype=dtype)
            results.append(node)
            outputs.append(output)
        program.graph.output_node().args = (tuple(results),)
        remove_dead_code(program.graph)
        return replace(program, signature=replace(program.signature, outputs=tuple(outputs)))


def _uncast(node: Node, dtype: torch.dtype) -> Node:
    is_cast = node.op == "call_function" and node.target is aten._to_copy.default
    return node_at(node, 0) if is_cast and tensor_of(node.args[0]).dtype == dtype else node
