"""Finds calls that only the caller reads and that depend on a collective: they are computed last, so that nothing waits for it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

from torch.fx import Node

from autopar.graph.gone_on_with import is_gone_on_with
from autopar.ir.collectives import is_launch, wait
from autopar.ir.keys import PHASE


def late_readers(nodes: Sequence[Node], under_way: Collection[Node] = (), summed: Collection[Node] = ()) -> frozenset[Node]:
    """Those of `nodes`, the calls of one section in the order of the graph, that read what the section's collectives bring, or those
    `under_way` before it, and that nobody reads but such and the caller, or the sums over microbatches that `summed` go to: the shape that
    a reduced gradient gets at the end. Collectives themselves are none, and of the backward what it goes on with brings none: it is waited
    for anyway."""
    inside, follows = {*nodes, *under_way}, set[Node]()
    for node in nodes:
        if any(operand in follows or _is_left(operand) for operand in node.all_input_nodes if operand in inside):
            follows.add(node)
    late: set[Node] = set()
    for node in reversed(nodes):
        if node not in follows or is_launch(node):
            continue
        if all(user in late or user.op == "output" or (node in summed and user not in inside) for user in node.users):
            late.add(node)
    # What an op of several results gives is named where the op is.
    named = {node for node in late if node.target is operator.getitem and node.all_input_nodes[0] not in late}
    return frozenset(node for node in late - named if node.target is not wait)


def _is_left(node: Node) -> bool:
    return is_launch(node) and (PHASE.get(node) != "backward" or not is_gone_on_with(node))
