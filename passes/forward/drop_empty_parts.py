"""A `cat` with nothing is its operand: what a cache that holds nothing yet leaves in a training step, or `einops.pack` of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, lay_out_anew, replace, tensor_of
from autopar.graph.overwrites import memory_of, writers_of, written_by
from autopar.ir.program import Program
from autopar.ops.traits import EXPANSIONS, RESHAPES, WHOLE_VIEWS

aten = torch.ops.aten

# Views that fit any layout of their operand, if need be by a copy.
_FIT_ANY_LAYOUT = {*WHOLE_VIEWS, *RESHAPES, *EXPANSIONS, aten.slice.Tensor, aten.select.int, aten.contiguous.default}


@dataclass(frozen=True)
class DropEmptyParts:
    """`aten.cat` of one tensor, or of some of which all but one are empty → that one; of several → the `cat` of these.

    Reads: val. Writes: a copy where the result or its one operand is written in place, or somebody reads its layout.
    Ensures: values, shapes and dtypes are unchanged; strides may be the operand's.
    """

    name: str = "drop empty parts"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        writers = writers_of(program.graph)
        for node in list(program.graph.nodes):
            if node.target is aten.cat.default and (parts := _parts(node)):
                emit = Emitter(program.graph, before=node)
                if len(parts) > 1:
                    replace(node, emit.call(aten.cat.default, parts, *node.args[1:], **node.kwargs))
                elif _needs_memory(node, parts[0], writers):
                    replace(node, emit.call(aten.clone.default, parts[0], memory_format=torch.contiguous_format))
                else:
                    replace(node, parts[0])
                    lay_out_anew(parts[0])
        remove_dead_code(program.graph)
        return program


def _parts(cat: Node) -> list[Node]:
    """The operands that are not empty, if some are, or there is one alone, and the result has their dtype."""
    operands = cat.args[0]
    assert isinstance(operands, Sequence)
    parts = [each for each in operands if isinstance(each, Node) and tensor_of(each).numel()]
    # An empty tensor counts in the dtype of the result.
    same = {tensor_of(each).dtype for each in parts} == {tensor_of(cat).dtype}
    return parts if same and (len(parts) == 1 or len(parts) < len(operands)) else []


def _needs_memory(cat: Node, part: Node, writers: Sequence[Node]) -> bool:
    """Whether `cat` has to be memory of its own, or to lie as a `cat` does."""
    written = {memory_of(written_by(writer)) for writer in writers}
    shown = [node for node in cat.graph.nodes if node is not cat and node.op == "call_function" and memory_of(node) is cat]
    is_result = any(user.op == "output" for value in (cat, *shown) for user in value.users)
    return is_result or bool(written & {memory_of(part), cat}) or any(node.target not in _FIT_ANY_LAYOUT for node in shown)
