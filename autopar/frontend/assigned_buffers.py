"""Buffers in whose place forward puts new tensors (`self.mean = 0.9 * self.mean + ...`): written in place where that is the same.

It is where the new tensor is like the old one, has no gradient and lies in memory of its own, and nobody else holds the old one: then
what was made before of the old values stays, and whoever reads the buffer afterwards finds the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from autopar._torch import fake_mode_of, is_fake
from autopar.errors import CaptureError
from autopar.frontend.attributes import tensors_of
from autopar.frontend.exported import placeholder_of
from autopar.frontend.shared_memory import in_one_memory
from autopar.graph.differentiable import differentiable
from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.overwrites import memory_of, writers_of, writes, written_by
from autopar.ir.program import Input, Program

aten = torch.ops.aten
# Of buffers by name, why what forward assigns cannot be written into them; empty where it can.
Assigned = Mapping[str, str]


def assigned_buffers(model: nn.Module, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """The buffers for which a forward on fake tensors has set others, by what it found under each name and what it left there.

    Raises `CaptureError` for one that was not there: what later calls would find in it (a table, the first batch's mean), they would make.
    """
    made = [name for name, _ in model.named_buffers() if name not in before]
    if made:
        raise CaptureError(
            f"forward makes buffers that the model does not have yet ({', '.join(map(repr, made))}), and a captured program would make "
            "them anew in every call; make them in __init__, or call the model once before autopar.compile, on its longest input where "
            "their sizes go by that"
        )
    names = [name for name, _ in model.named_buffers() if after[name] is not before[name]]
    return {name: _difference(before[name], after[name]) or _holder(model, name) for name in names}


def assigned_value(model: nn.Module, name: str) -> Any:
    """What a module has under the path of one of its buffers."""
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part)
    return value


def assigned_written(program: Program, model: nn.Module, assigned: Assigned) -> tuple[Program, dict[str, str]]:
    """Write into its buffer what a FORWARD program has as an output of kind "buffer", and drop that output.

    Reads: `val`. Returns the program, and `assigned` with the reasons that its graph gives. Ensures: there are no such outputs.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    inputs = {id(buffers[item.name]): node for item, node in program.named_inputs() if item.kind == "buffer" and item.name in buffers}
    pairs = list(program.named_outputs())
    values = {item.name: node for item, node in pairs if item.kind == "buffer"}
    kept = [(item, node) for item, node in pairs if item.kind != "buffer"]
    program.graph.output_node().args = (tuple(node for _, node in kept),)
    program = replace(program, signature=replace(program.signature, outputs=tuple(item for item, _ in kept)))
    memories, found = [memory_of(value) for value in values.values()], dict(assigned)
    for name, value in values.items():
        memory, target = memory_of(value), inputs.get(id(buffers[name]))
        if memory.op == "placeholder" or memories.count(memory) > 1:
            found[name] = "it lies in the memory of another tensor that the model has or is given"
            continue
        if target is None:
            program, target = _with_buffer(program, name, value)
        _write(program, target, value)
    return program, found


def _difference(old: torch.Tensor, new: Any) -> str:
    if not isinstance(new, torch.Tensor):
        return f"it is of type {type(new).__name__}"
    if not is_fake(new):
        return "it is a tensor that something else holds"
    if (new.shape, new.dtype, new.device, new.layout) != (old.shape, old.dtype, old.device, old.layout):
        one, other = (f"{tuple(each.shape)} of {each.dtype} on {each.device}" for each in (new, old))
        return f"it is {one}, the buffer is {other}"
    return "it has a gradient" if new.requires_grad else ""


def _holder(model: nn.Module, name: str) -> str:
    """Who else holds a buffer, as it is or as a part: there the old values would stay."""
    path, _, attribute = name.rpartition(".")
    owner, buffer = model.get_submodule(path), model.get_buffer(name)
    others = {
        f"{path}.{each}".lstrip("."): value
        for path, module in model.named_modules()
        for each, value in (*module.named_parameters("", False, False), *module.named_buffers("", False, False))
        if not (module is owner and each == attribute)
    }
    held = [*others.items(), *((path, value) for path, values in tensors_of(model).items() for value in values)]
    other = next((path for path, value in held if in_one_memory(buffer, value)), None)
    return "" if other is None else f"{other!r} lies in the same memory, and would keep the old values"


def _with_buffer(program: Program, name: str, like: Node) -> tuple[Program, Node]:
    """With one more buffer, which is as `like`: of those that forward does not read an export knows nothing."""
    value, items, graph = tensor_of(like), list(program.signature.inputs), program.graph
    place = sum(item.kind in ("parameter", "buffer") for item in items)
    items.insert(place, Input("buffer", name, tuple(value.shape), value.dtype))
    placeholders = program.placeholders
    with graph.inserting_before(placeholders[place] if place < len(placeholders) else next(iter(graph.nodes))):
        node = placeholder_of(graph, items[place])
    with fake_mode_of(value):
        node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return replace(program, signature=replace(program.signature, inputs=tuple(items))), node


def _write(program: Program, target: Node, value: Node) -> None:
    """Write `value` into the buffer `target`, once nobody reads the old values, nor changes `value` in place.

    Where they are needed for longer, by the backward or by the user, who gets them returned, all read a copy of the old ones.
    """
    graph, trained = program.graph, differentiable(program)
    readers = [node for node in graph.nodes if node.op == "call_function" and target in map(memory_of, node.all_input_nodes)]
    writers = [node for node in writers_of(graph) if memory_of(written_by(node)) is memory_of(value)]
    if target in map(memory_of, program.results) or not trained.isdisjoint(readers) or any(map(writes, readers)):
        first = next(node for node in graph.nodes if node.op != "placeholder")
        old = _outside(Emitter(graph, first, value).call(aten.clone.default, target))
        target.replace_all_uses_with(old, delete_user_cb=lambda user: user is not old)
        readers = [old]
    _outside(Emitter(graph, max([value, *readers, *writers]).next, value).call(aten.copy_.default, target, value))


def _outside(node: Node) -> Node:
    """A region under `torch.utils.checkpoint`, which is computed again, does not assign again."""
    node.meta.pop("ac_graph_id", None)
    return node
