"""Where a section of the backward is cut so that what it has read for the last time can be freed.

A fragment holds all its inputs until it is over. Of a whole layer these are all that was saved of it:

    RUN f3 (gelu, mlp_in, norm, …)            all of them are there until the layer is over
    FREE gelu mlp_in norm …

    RUN f3 (gelu, …)    FREE gelu             cut behind its last reader
    RUN f4 (mlp_in, …)  FREE mlp_in
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from autopar._torch import schema_of
from autopar.ir.collectives import is_launch, wait
from autopar.ir.keys import PHASE
from autopar.ir.program import results_of

# What is this much smaller than the largest value that a section reads is not worth a cut.
_SHARE = 1 / 16


def last_reads(nodes: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
    """By call of the backward, of a section in the order of the graph, the large memories that it is the last to read.

    A memory is named by the call that makes it. None of what others than the section and calls before it read: who comes last there is
    not known here.
    """
    readers: dict[Node, Node] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            memory = _memory(operand)
            if memory.op == "call_function":
                readers[memory] = node
    inside = set(nodes)
    sizes = {memory: _bytes(memory) for memory in readers if not _is_read_elsewhere(memory, nodes[0], inside)}
    least = _SHARE * max(sizes.values(), default=0)
    found: dict[Node, tuple[Node, ...]] = {}
    for memory, size in sizes.items():
        last = readers[memory]
        if size >= least and PHASE.get(last) == "backward" and not is_launch(last) and last.target is not wait:
            found[last] = (*found.get(last, ()), memory)
    return found


def _is_read_elsewhere(memory: Node, first: Node, inside: set[Node]) -> bool:
    """Whether what is no call before the section reads it, through views, such as the caller."""
    pending = [memory]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user not in inside and not user < first:
                return True
            if _memory(user) is memory:
                pending.append(user)
    return False


def _memory(node: Node) -> Node:
    """The node in whose memory `node` lies."""
    while node.op == "call_function" and node.all_input_nodes:
        schema = schema_of(node.target)
        if schema is None or not any(each.alias_info for each in schema.returns):
            break
        node = node.all_input_nodes[0]
    return node


def _bytes(node: Node) -> int:
    return sum(value.nbytes for value in results_of(node) if value is not None)
