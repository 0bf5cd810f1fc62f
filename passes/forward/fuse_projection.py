"""The projection onto the vocabulary joins the cross entropy of what it makes, where the logits take too much memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.overwrites import overwritten, writers_of
from autopar.ir.arguments import arguments, int_at
from autopar.ir.fusion import FusionDecision, FusionSite
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.kernels.cross_entropy import cross_entropy
from autopar.kernels.projected_cross_entropy import projected_cross_entropy

aten = torch.ops.aten

_SHAPED = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SAME = (aten.contiguous.default, aten.clone.default, aten._to_copy.default, aten.to.dtype)
# The part of the budget that logits and their gradient may take before they are made in chunks.
_SHARE = 1 / 8


@dataclass(frozen=True)
class FuseProjection:
    """`autopar.cross_entropy` of `aten.linear` without bias → `autopar.projected_cross_entropy`: logits are made in chunks, twice.

    It costs a third of the projection's work on top and saves the logits and their gradient: written where these, divided over
    all ranks, take more than an eighth of `capacity_bytes`.

    Reads: a FORWARD program after `FuseCrossEntropy`. Views, slices of rows and casts between projection and loss move in front of
        the projection. Writes: the fused op, and these on the hidden states.
    Ensures: what is decided to be fused is; logits that anything else reads stay.
    """

    capacity_bytes: float
    name: str = "fuse projection"

    def decide(self, program: Program) -> FusionDecision:
        called = [node for node in program.graph.nodes if node.target is cross_entropy]
        writers = writers_of(program.graph)
        return FusionDecision(tuple(self._looked_at(node, program.mesh, writers) for node in called))

    def apply(self, program: Program, decision: FusionDecision) -> Program:
        if not decision.fused:
            return program
        program = program.copy()
        for each in decision.fused:
            _write(program.node(each.node))
        remove_dead_code(program.graph)
        return program

    def _looked_at(self, node: Node, mesh: Mesh, writers: Sequence[Node]) -> FusionSite:
        what = "cross entropy's projection"
        steps = _steps_up(node)
        if isinstance(steps, str):
            return FusionSite.at(node, what, reason=steps)
        writer = overwritten((*arguments(steps[-1])[:2], *steps), node, writers)
        if writer is not None:
            return FusionSite.at(node, what, reason=f"{writer.target} writes in place into what it reads")
        logits: Any = node.args[0]
        value = tensor_of(logits)
        num_ranks = mesh.size // mesh.size_of(mesh.parts("pp"))  # of one stage: no other has logits
        num_bytes = 2 * value.numel() * value.itemsize / num_ranks
        most = _SHARE * self.capacity_bytes
        size = f"logits and their gradient take {num_bytes / 1e6:.4g} MB of a rank"
        if num_bytes <= most:
            limit = "no budget is given" if math.isinf(most) else f"at most {most / 1e6:.4g} MB stay whole"
            return FusionSite.at(node, what, reason=f"{size}, and {limit}")
        return FusionSite.at(node, what, (f"{size}, more than {most / 1e6:.4g} MB",))


def _steps_up(node: Node) -> list[Node] | str:
    """The nodes from the logits of a cross entropy up to a projection, which is the last; or why there are none."""
    found: list[Node] = []
    value: Any = node.args[0]
    while True:
        found.append(value)
        if len(value.users) > 1:
            return "its logits are read elsewhere, too"
        if value.target is aten.linear.default:
            if len(value.args) > 2 and value.args[2] is not None:
                return "the projection has a bias"
            return found if tensor_of(value.args[1]).dim() == 2 else "the projection is onto one number"
        if not _is_of_rows(value):
            return "its logits are no projection, or are changed after it"
        value = value.args[0]


def _is_of_rows(node: Node) -> bool:
    """Whether a node only lays out or selects rows, and leaves each as it is."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    before, after = tensor_of(node.all_input_nodes[0]), tensor_of(node)
    if node.target in _SAME:
        return before.dtype == after.dtype
    if node.target is aten.slice.Tensor:
        return len(node.args) > 1 and int_at(node, 1) % before.dim() != before.dim() - 1
    return node.target in _SHAPED and before.dim() > 0 and after.dim() > 0 and before.shape[-1] == after.shape[-1]


def _write(node: Node) -> None:
    steps = _steps_up(node)
    assert isinstance(steps, list), steps
    projection = steps[-1]
    hidden, weight = projection.args[:2]
    emit = Emitter(node.graph, before=node)
    for step in reversed(steps[:-1]):
        hidden = _on_hidden(emit, step, hidden)
    sums = emit.call(projected_cross_entropy, hidden, weight, *node.args[1:])
    node.replace_all_uses_with(sums)


def _on_hidden(emit: Emitter, step: Node, hidden: Any) -> Node:
    """`step`, which was taken by rows of logits, taken by rows of hidden states."""
    if step.target in _SHAPED:
        shape: Sequence[int] = tensor_of(step).shape[:-1]
        return emit.call(aten.reshape.default, hidden, [*shape, tensor_of(hidden).shape[-1]])
    if step.target is aten.slice.Tensor:
        return emit.call(aten.slice.Tensor, hidden, *step.args[1:])
    return hidden
