"""Buffers of whose new value nothing depends on the batch: a count of steps is written once a step, however many microbatches there are.

Every microbatch finds a buffer as the one before left it. One that is written once takes its new value in the first, and keeps it:

    written = where(microbatch = 0, new, old)

So whoever reads the new value has the same in every microbatch, which is what one device has of the whole batch. The old value is there
in the first alone: a buffer of which anything else reads it, or what is made of it on the way, is none of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    while wrong := _wrong(program, changed, found):
        found = {name: each for name, each in found.items() if name not in wrong}
    return found


def _is_alike(written: Written) -> bool:
    old, new = tensor_of(written.old), tensor_of(written.new)
    return old.shape == new.shape and old.dtype == new.dtype


def _wrong(program: Program, changed: Collection[str], found: Mapping[str, Written]) -> set[str]:
    """Which of the buffers `found` depend on more than each other and what does not change in a step, or have an old value that is read."""
    free = _free(program, set(changed) - found.keys())
    new = {each.new for each in found.values()}
    on_the_way: set[Node] = set()
    for node in reversed(program.graph.nodes):
        if node in new or any(user in on_the_way for user in node.users):
            on_the_way.add(node)
    made_of = {each.old: {name} for name, each in found.items()}
    wrong = {name for name, each in found.items() if each.new not in free}
    for node in program.graph.nodes:
        if node in new:
            continue  # this may be read
        names = made_of.setdefault(node, set[str]()).union(*(made_of.get(each, ()) for each in node.all_input_nodes if each not in new))
        made_of[node] = names
        if not all(user in on_the_way for user in node.users):
            wrong |= names
    return wrong


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
