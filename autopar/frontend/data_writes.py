"""Tensors that forward writes through `.data`, or `.detach()`: no gradient of what is written there reaches the buffer itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from autopar.graph.differentiable import differentiable
from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.overwrites import gives_back, memory_of, writers_of, written_by
from autopar.ir.program import Program

aten = torch.ops.aten
# What Dynamo makes of `x.data = y`: the second since torch 2.15. A program would leave either out, as a write that nothing reads.
_GIVES_OTHER_DATA = ("aten.set_.", "aten.shallow_copy_data_.")


def gives_other_data(node: Node) -> bool:
    return str(node.target).startswith(_GIVES_OTHER_DATA)


def own_data_kept(graph: Graph) -> None:
    """Drop what gives a tensor the data that it has: Python makes `x.data = x.data.mul_(y)` of `x.data *= y`."""
    for node in filter(gives_other_data, list(graph.nodes)):
        if len(node.args) == 2 and len({_itself(each) for each in node.args}) == 1:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def other_data_copied(graph: Graph) -> None:
    """Write what gives an input other data, `x.data = y`, into the memory that it has, where nobody can tell: `y` is new, like `x`, and
    nothing reads it otherwise from then on, nor another name of what `x` was."""
    for node in filter(gives_other_data, list(graph.nodes)):
        if len(node.args) == 2 and all(isinstance(each, Node) for each in node.args) and _may_be_copied(node):
            target, value = node.all_input_nodes
            emit = Emitter(graph, node)
            copied = emit.call(aten.copy_.default, target, emit.call(aten.detach.default, value))
            node.replace_all_uses_with(copied)
            graph.erase_node(node)


def _may_be_copied(node: Node) -> bool:
    target, value = node.all_input_nodes
    memory, own = memory_of(target), {*_behind(target)}
    like = [(each.shape, each.dtype) for each in map(tensor_of, (target, value))]
    if memory.op != "placeholder" or _itself(target) is not memory or memory_of(value).op == "placeholder" or like[0] != like[1]:
        return False
    for reader in (each for each in node.graph.nodes if node < each):
        for operand in reader.all_input_nodes:
            # Other names, made before, of what `target` was; what writes in place gives back the name that it is given.
            others = (each for each in _behind(operand) if each not in own and not (each.op == "call_function" and gives_back(each)))
            if memory_of(operand) is memory_of(value) or (memory_of(operand) is memory and any(each < node for each in others)):
                return False
    return True


def _itself(value: object) -> object:
    """The tensor that `value` is once it was detached and written in place."""
    while isinstance(value, Node) and value.op == "call_function" and (value.target is aten.detach.default or gives_back(value)):
        value = written_by(value)
    return value


def data_writes_detached(program: Program) -> None:
    """Detach what a FORWARD program writes into its buffers through a detached alias, unless it reads that alias afterwards.

    Whoever reads the alias has a gradient of what was written, whoever reads the buffer has none. Reads: `val`.
    """
    buffers = {node for item, node in program.named_inputs() if item.kind == "buffer"}
    for writer in writers_of(program.graph):
        alias = next((each for each in _behind(written_by(writer)) if each.target is aten.detach.default), None)
        if alias is None or memory_of(alias) not in buffers or _is_read(alias, writer):
            continue
        trained = differentiable(program)
        for operand in [each for each in writer.all_input_nodes if each in trained]:
            writer.replace_input_with(operand, Emitter(program.graph, writer).call(aten.detach.default, operand))


def _behind(value: Node) -> Iterator[Node]:
    """`value`, what it is a view of, and so on to the memory itself."""
    memory = memory_of(value)
    yield value
    while value is not memory:
        value = written_by(value)
        yield value


def _is_read(alias: Node, writer: Node) -> bool:
    """Whether anything but other writes reads what `writer` has written by a name that goes back to `alias`."""
    pending, seen = [alias], set[Node]()
    while pending:
        node = pending.pop()
        for user in node.users.keys() - seen:
            if user.op == "call_function" and alias in _behind(user):
                seen.add(user)
                pending.append(user)
            elif user > writer:
                return True
    return False
