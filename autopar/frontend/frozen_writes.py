"""Parameters that do not train and that forward writes, as those of a momentum teacher: a program has them as buffers.

No gradient is theirs, and like a buffer they are what the call before left. Those that only change outside of forward stay parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from autopar.graph.overwrites import memory_of, writers_of, written_by
from autopar.ir.placement import Placement
from autopar.ir.program import Input, Program

_Pair = tuple[Input, Node]


def written_as_buffers(graph: Graph, items: Sequence[Input]) -> tuple[Input, ...]:
    """`items` of the placeholders of a FORWARD graph, such parameters as buffers behind those that stay parameters, and placeholders
    likewise."""
    written = {memory_of(written_by(writer)) for writer in writers_of(graph)}
    placed = zip(items, graph.find_nodes(op="placeholder"), strict=True)
    return _with_buffers(graph, items, {item.name for item, node in placed if node in written and not item.requires_grad})


def known_as_buffers(program: Program, placements: Mapping[str, Placement]) -> Program:
    """Likewise those that another call of the model writes, by their `placements`; this one may only read them."""
    names = {name for name, placement in placements.items() if placement.is_written}
    items = _with_buffers(program.graph, program.signature.inputs, names)
    return replace(program, signature=replace(program.signature, inputs=items))


def _with_buffers(graph: Graph, items: Sequence[Input], names: Collection[str]) -> tuple[Input, ...]:
    parameters, buffers, others = list[_Pair](), list[_Pair](), list[_Pair]()
    for item, node in zip(items, graph.find_nodes(op="placeholder"), strict=True):
        if item.kind != "parameter":
            others.append((item, node))
        elif item.name not in names or item.requires_grad:
            parameters.append((item, node))
        else:
            buffers.append((replace(item, kind="buffer", is_parameter=True), node))
    found = [*parameters, *buffers, *others]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for _, node in found if buffers else ():
        first.prepend(node)
    return tuple(item for item, _ in found)
