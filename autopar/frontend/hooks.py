"""Hooks that forward registers on gradients: `hidden.register_hook(lambda gradient: gradient * 2)`.

`torch.export` drops them, and gradients would silently be wrong. So while a model is exported each hook stands in the graph as a
custom function: forward the identity, backward what the hook computes. `hooks_placed` then has all readers of the tensor
read through it, those before the hook as well: a hook sees the whole gradient of its tensor.

    h = linear(x)                    h  = linear(x)
    a = tanh(h)                      h' = custom_function(h)      backward: hook
    h.register_hook(hook)     →      a  = tanh(h')
    b = sin(h)                       b  = sin(h')
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from autopar.errors import CaptureError
from autopar.frontend._torch import hooks_replaced
from autopar.frontend.custom_functions import keep
from autopar.graph.custom_functions import CustomFunction, custom_function
from autopar.graph.overwrites import memory_of, writers_of, written_by
from autopar.ir.source import path_of, source_of

aten = torch.ops.aten


@contextmanager
def hooks_kept() -> Generator[None]:
    """While this is entered, export keeps every hook on an intermediate value as a call of `autopar.custom_function`.

    Raises `CaptureError` at its end where forward has registered one on a parameter or an input: each call would add another.
    """
    leaves: list[str] = []
    with hooks_replaced(_keep, leaves.append):
        yield
    if leaves:
        names = ", ".join(sorted({repr(path_of(name, "model.")) for name in leaves}))
        raise CaptureError(
            f"forward registers a hook on a parameter or an input ({names}), one more in each call; "
            "register it once, before the call, or on a value that forward computes"
        )


def _keep(body: GraphModule, tensor: Tensor, others: Sequence[Any]) -> Tensor:
    if not all(isinstance(each, Tensor) for each in others) or any(node.op in ("get_attr", "call_module") for node in body.graph.nodes):
        raise CaptureError(
            "a hook on a gradient reads something that is no tensor of forward\n  how to mend it: let it read tensors that forward computes"
        )
    options = {"non_differentiable_idx": [], "saved_for_backward_idx": []}
    function = CustomFunction(_identity(len(others)), _hooked(body, len(others)), options, is_tuple=False, is_hook=True)
    return keep(function, [tensor, *others])[0]


def _identity(num_others: int) -> GraphModule:
    graph = Graph()
    tensor, *others = [graph.placeholder(f"operand_{number}") for number in range(1 + num_others)]
    graph.output((graph.call_function(aten.alias.default, (tensor,)), tuple(others)))
    return GraphModule(nn.Module(), graph)


def _hooked(body: GraphModule, num_others: int) -> GraphModule:
    """What `body` makes of the gradient, if it makes something of it, and no gradient for the other tensors that it reads."""
    graph, mapping = Graph(), dict[Node, Node]()
    for node in body.graph.find_nodes(op="placeholder"):
        mapping[node] = graph.placeholder(node.name)
    found: Any = graph.graph_copy(body.graph, mapping)
    while isinstance(found, (tuple, list)):
        found = found[0]
    if found is None:
        found = next(iter(mapping.values()))
    graph.output((found, *[None] * num_others))
    return GraphModule(nn.Module(), graph)


def hooks_placed(graph: Graph) -> None:
    """Have every reader of a tensor with a hook read what passes through it. Raises `CaptureError` where that cannot be."""
    hooks = [node for node in graph.nodes if (function := custom_function(node.target)) is not None and function.is_hook]
    written = {memory_of(written_by(writer)) for writer in writers_of(graph)} if hooks else set()
    for hook in hooks:
        (result,) = (node for node in hook.users if node.target is operator.getitem)
        tensor = hook.all_input_nodes[0]
        _refuse(hook, memory_of(tensor) in written or memory_of(result) in written, "is written in place")
        _refuse(hook, tensor.target is operator.getitem and tensor.all_input_nodes[0] in hooks, "has another hook already")
        order = {node: number for number, node in enumerate(graph.nodes)}
        last = max(hook.all_input_nodes, key=order.__getitem__)
        # What is detached has no gradient that the hook would see; often it is what the hook reads.
        readers = [node for node in tensor.users if node is not hook and node.target is not aten.detach.default]
        _refuse(hook, any(order[node] <= order[last] for node in readers), "is read by what its hook reads")
        last.append(hook)
        hook.append(result)
        for reader in readers:
            reader.replace_input_with(tensor, result)


def _refuse(hook: Node, condition: bool, why: str) -> None:
    if condition:
        raise CaptureError(
            f"{source_of(hook, 'model.')}: the tensor that register_hook is called on {why}, so that its hook cannot be captured; "
            "register one hook, on a tensor of its own (hidden = hidden.clone()), before anything else reads it"
        )
