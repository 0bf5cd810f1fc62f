"""Buffers of whose new value nothing depends on the batch: a count of steps is written once a step, however many microbatches there are.

Every microbatch finds another buffer as the one before left it. One that is written once all find as the step does, so that its old
value, and what is made of it, the new one, are the same in every microbatch, as one device has them of the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.ir.keys import SHARDING
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Input, Program


@dataclass(frozen=True)
class Written:
    """The old and the new value of a buffer."""

    old: Node
    new: Node


def written_once(program: Program) -> dict[str, Written]:
    """By name those buffers of a GLOBAL or LOCAL program."""
    old = {item.name: node for item, node in program.named_inputs() if item.kind == "buffer"}
    changed = {output.name: Written(old[output.name], node) for output, node in program.named_outputs() if output.kind == "buffer"}
    found = {name: each for name, each in changed.items() if each.new.op == "call_function" and _is_alike(each)}
    while True:
        free = _free(program, changed.keys() - found.keys())
        kept = {name: each for name, each in found.items() if each.new in free}
        if len(kept) == len(found):
            return found
        found = kept


def _is_alike(written: Written) -> bool:
    old, new = tensor_of(written.old), tensor_of(written.new)
    return old.shape == new.shape and old.dtype == new.dtype


def _free(program: Program, changing: Collection[str]) -> set[Node]:
    """The nodes that depend on parameters, constants, and buffers other than `changing` alone, and on no microbatch."""
    found = {node for item, node in program.named_inputs() if _is_free(item, changing)}
    for node in program.graph.nodes:
        is_part = any(MICROBATCHES in each.axes for each in SHARDING.get(node) or ())
        if node.op == "call_function" and not is_part and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _is_free(item: Input, changing: Collection[str]) -> bool:
    if item.kind == "coordinate":
        return MICROBATCHES not in item.name.split(",")
    return item.kind in ("parameter", "constant") or (item.kind == "buffer" and item.name not in changing)
