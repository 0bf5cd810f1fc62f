"""Which gathers of parameters, and of other inputs, are waited for at once, so that one fragment reads them all."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

from torch.fx import Node

from autopar.graph.cut_places import Place
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import node_at
from autopar.ir.collectives import all_gather, is_launch, wait

# What a fragment's later calls may have gathered for them when its first begins. A call of a fragment from Python takes some 30 µs;
# gathering a MiB takes ten on a fast link. A larger fragment holds its inputs longer, too: where memory is short nothing is joined.
TOGETHER_BYTES = 1 << 20


def awaited_together(nodes: Sequence[Node], apart: Collection[Node], under_way: Collection[Node]) -> dict[Node, tuple[Node, ...]]:
    """By call that begins a fragment: the WAITs, beside its own, for gathers that later calls of the fragment are the first to read.

    Together these bring at most `TOGETHER_BYTES`. Only gathers whose operand is an input, or in `apart`: made of one input alone.
    `under_way` are collectives that earlier sections launched.
    """
    found: dict[Node, tuple[Node, ...]] = {}
    awaited, first, taken, place = {*under_way, *filter(is_launch, nodes)}, None, 0, Place()
    for node in nodes:
        if node.target is wait or node.target is operator.getitem:
            continue
        needed = [each for each in node.all_input_nodes if each.target is wait and node_at(each, 0) in awaited]
        awaited.difference_update(node_at(each, 0) for each in needed)
        before, place = place, place.at(node)
        is_apart = is_launch(node) or node in apart
        if place.is_cut_from(before) or (is_apart and needed) or not all(_is_of_inputs(each, apart) for each in needed):
            first = None
        if is_apart:
            continue
        taken += sum(tensor_of(each).nbytes for each in needed)
        if first is None or taken > TOGETHER_BYTES:
            first, taken = node, 0
        elif needed:
            found[first] = (*found.get(first, ()), *needed)
    return found


def _is_of_inputs(awaited: Node, apart: Collection[Node]) -> bool:
    launch = node_at(awaited, 0)
    operand = node_at(launch, 0)
    return launch.target is all_gather and (operand.op == "placeholder" or operand in apart)
