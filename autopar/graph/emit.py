"""Emits nodes into a graph, each with its fake value and the origin of the node it stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from autopar._torch import FakeTensorMode, fake_mode_of, is_fake
from autopar.graph.fake_calls import fake_call
from autopar.ir.keys import PHASE, SOURCE, STAGE, Source

# `ac_graph_id` is the region under `torch.utils.checkpoint`, `original_aten` the op that a node was decomposed from, `from_node` the
# call it goes back to.
_TRACE_RECORDS = ("stack_trace", "nn_module_stack", "seq_nr", "ac_graph_id", "original_aten", "from_node")
# Those that are read once a node has its SOURCE.
_READ_LATER = frozenset(_TRACE_RECORDS) - {"stack_trace"} | {"val", "fwd_nn_module_stack"}


class Emitter:
    """Inserts calls before the node `before`; they inherit the source and trace records of `like` (`before` unless given).

    Values are computed under the fake mode of the graph's own values, without autograd.
    """

    def __init__(self, graph: Graph, before: Node, like: Node | None = None) -> None:
        self.graph = graph
        self._before = before
        self._like = like or before
        self._mode = _mode_of(graph)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """One call of `target`. Nodes among the arguments stand for their values."""
        with self.graph.inserting_before(self._before):
            node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        node.meta["val"] = fake_call(self._mode, target, fake_args, fake_kwargs)
        copy_origin(self._like, node)
        return node

    def cast(self, value: Node, dtype: torch.dtype) -> Node:
        """`value` in `dtype`; itself where it has that dtype already."""
        if tensor_of(value).dtype == dtype:
            return value
        return self.call(torch.ops.aten._to_copy.default, value, dtype=dtype)


def copy_origin(source: Node, target: Node) -> None:
    """Give `target`, which stands for (a part of) `source`, its phase, stage, source and trace records."""
    for record in _TRACE_RECORDS:
        if record in source.meta:
            target.meta[record] = source.meta[record]
    SOURCE[target] = SOURCE.get(source) or Source()
    if (phase := PHASE.get(source)) is not None:
        PHASE[target] = phase
    if (stage := STAGE.get(source)) is not None:
        STAGE[target] = stage


def drop_records(graph: Graph) -> None:
    """Drop what tracing wrote on nodes and nobody reads once they have their SOURCE. Every copy of the graph would copy and hold it."""
    for node in graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if not isinstance(key, str) or key in _READ_LATER}


def tensor_of(node: object) -> torch.Tensor:
    """The fake value of a node with one result; an argument of a call that is one."""
    assert isinstance(node, Node), f"{node!r} is no node"
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node} has no single value but {value!r}"
    return value


def replace(node: Node, by: Node) -> None:
    """Let `by` stand for `node` everywhere, and drop `node`."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def lay_out_anew(node: Node) -> None:
    """The op has a layout of its own: values below follow it, and a `view` that does not fit it becomes `reshape`."""
    pending, mode = [node], fake_mode_of(tensor_of(node))
    while pending:
        for user in list(pending.pop().users):
            before = user.meta.get("val")
            if user.op != "call_function" or not isinstance(before, torch.Tensor):
                continue
            if user.target is torch.ops.aten.view.default:
                user.target = torch.ops.aten.reshape.default
            args, kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda operand: operand.meta["val"])
            user.meta["val"] = fake_call(mode, user.target, args, kwargs)
            if tensor_of(user).stride() != before.stride():
                pending.append(user)


def _mode_of(graph: Graph) -> FakeTensorMode:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and is_fake(value):
            return fake_mode_of(value)
    raise AssertionError("no node of this graph has a fake value")
