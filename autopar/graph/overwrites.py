"""Ops that write in place, in a FORWARD program: whose memory they write, and who else would read it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch.fx import Graph, Node

from autopar._torch import schema_of, writes_operands
from autopar.ir.arguments import all_named, node_at

aten = torch.ops.aten

# Whether their results share the operand's memory goes by how it lies, or by its dtype; no schema says so.
SHOWS_OR_COPIES = frozenset(
    {
        aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints, aten.to.dtype, aten.to.dtype_layout, aten.to.device,
        aten.to.other, aten.reshape_as.default, aten.type_as.default, aten.ravel.default,
    }
)  # fmt: skip
# Their results may share the operand's memory, although no schema says so.
_MAY_SHOW = SHOWS_OR_COPIES | {
    aten.expand_as.default, aten.view_as.default, aten.dropout.default, aten.chunk.default, aten.unflatten.int,
}  # fmt: skip
# Their results show parts that do not overlap.
_DISJOINT = frozenset({aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.unbind.int})

# Norms that move running statistics, by the flag without which they only read them.
_TRACKING: dict[object, str] = {
    aten.batch_norm.default: "training", aten.native_batch_norm.default: "training", aten.instance_norm.default: "use_input_stats",
}  # fmt: skip


def statistics_of(node: Node) -> tuple[Node, ...]:
    """The running statistics that a norm of a FORWARD program moves; no schema says that it writes them."""
    if node.target not in _TRACKING:
        return ()
    named = all_named(node)
    return tuple(each for each in (named["running_mean"], named["running_var"]) if isinstance(each, Node) and named[_TRACKING[node.target]])


def writes(node: Node) -> bool:
    """Whether `node` writes into an operand."""
    return writes_operands(node.target)


def written_by(writer: Node) -> Node:
    """The operand that a node writes into: its first, but for calls with `out=`."""
    out = writer.kwargs.get("out")
    return out if isinstance(out, Node) else writer.all_input_nodes[0]


def writers_of(graph: Graph) -> tuple[Node, ...]:
    """The nodes that write into an operand, in order."""
    return tuple(node for node in graph.nodes if node.op == "call_function" and writes(node))


def gives_back(writer: Node) -> bool:
    """Whether `writer` writes into an operand and its one result is that operand."""
    returns = schema_of(writer.target).returns if writes(writer) else ()
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def memory_of(node: Node) -> Node:
    """The node whose memory `node` may show."""
    while node.op == "call_function" and node.all_input_nodes and _shows(node):
        node = written_by(node)
    return node


def is_last_reader(reader: Node, value: Node) -> bool:
    """Whether nobody but `reader` reads the memory of `value`, so that what is written there is lost to nobody else."""
    # Inputs are read by all.
    while set(value.users) == {reader} and value.op == "call_function":
        if value.target is operator.getitem and node_at(value, 0).target in _DISJOINT:
            chunks = value.args[0]
            assert isinstance(chunks, Node)
            if sum(other.args[1] == value.args[1] for other in chunks.users) > 1:
                return False
            reader, value = chunks, chunks.all_input_nodes[0]
        elif value.target is not operator.getitem and _shows(value):
            reader, value = value, value.all_input_nodes[0]
        else:
            return True
    return False


def is_written_after(reader: Node, value: Node) -> bool:
    """Whether something behind `reader` writes into the memory of `value`."""
    memory = memory_of(value)
    return any(reader < writer and memory_of(written_by(writer)) is memory for writer in writers_of(reader.graph))


def is_copy_told(node: Node) -> bool:
    """Whether anybody can tell if `node` shows its operand or copies it: something behind it writes into the one, and something behind that
    reads the other, as the next call does of what the model holds."""
    memory, nodes = memory_of(node), node.graph.nodes
    for writer in writers_of(node.graph):
        target = written_by(writer)
        if writer < node or memory_of(target) is not memory:
            continue
        read = (each for reader in nodes if writer < reader for each in reader.all_input_nodes if memory_of(each) is memory)
        if memory.op == "placeholder" or any(_goes_back_to(node, each) != _goes_back_to(node, target) for each in read):
            return True
    return False


def _goes_back_to(name: Node, value: Node) -> bool:
    while value is not name and value.op == "call_function" and value.all_input_nodes and _shows(value):
        value = written_by(value)
    return value is name


def overwritten(values: Iterable[Node], before: Node, writers: Sequence[Node], own: Iterable[Node] = ()) -> Node | None:
    """The first of `writers`, but for `own`, that may write into one of `values` between where it is made and `before`."""
    first: dict[Node, Node] = {}
    for value in values:
        base = memory_of(value)
        first[base] = min(value, first.get(base, value))
    own = set(own)
    for writer in writers:
        made = first.get(memory_of(written_by(writer)))
        if made is not None and writer not in own and made < writer < before:
            return writer
    return None


def sources_of(values: Iterable[Node]) -> set[Node]:
    """`values` and all that they are computed from."""
    found: set[Node] = set()
    pending = list(values)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def between(source: Node, value: Node) -> set[Node]:
    """The nodes on the ways from `source` to `value`, both included; none where there is no way."""
    seen: set[Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node not in seen and not node < source:
            seen.add(node)
            pending += node.all_input_nodes
    found: set[Node] = set()
    for node in sorted(seen):
        if node is source or any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found if value in found else set()


def _shows(node: Node) -> bool:
    schema = schema_of(node.target)
    return schema is None or node.target in _MAY_SHOW or any(each.alias_info is not None for each in schema.returns)
