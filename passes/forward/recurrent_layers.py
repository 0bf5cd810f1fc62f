"""A recurrent network of several layers as one call a layer, for what is to be done between them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter
from autopar.ir.arguments import all_named

aten = torch.ops.aten

RECURRENT = frozenset((aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input))


def num_layers_with_dropout(node: Node) -> int:
    """Behind how many of its layers a call of a recurrent network drops values: behind all but the last in training, if it drops any."""
    given = all_named(node)
    return given["num_layers"] - 1 if given["train"] and given["dropout"] > 0.0 else 0


def by_layers(emit: Emitter, node: Node, between: Callable[[Node], Node]) -> tuple[Node, ...]:
    """What `node` gives, one of `RECURRENT`: outputs, and final states. `between` takes what a layer gives to what the next one reads.

    Weights lie layer by layer, in each direction by direction; states likewise, along their dim 0.
    """
    given = all_named(node)
    given_states = given["hx"]
    states = list(given_states) if isinstance(given_states, (list, tuple)) else [given_states]
    num_layers, num_ways = given["num_layers"], 2 if given["bidirectional"] else 1
    num_weights = len(given["params"]) // num_layers
    value, finals = given["input"], [list[Node]() for _ in states]
    for layer in range(num_layers):
        value = between(value) if layer else value
        begins = [emit.call(aten.slice.Tensor, state, 0, layer * num_ways, (layer + 1) * num_ways) for state in states]
        own = {
            "input": value,
            "hx": begins if len(begins) > 1 else begins[0],
            "params": list(given["params"][layer * num_weights : (layer + 1) * num_weights]),
            "num_layers": 1,
            "dropout": 0.0,
        }
        results = emit.call(node.target, *(given | own).values())
        value, *ends = (emit.call(operator.getitem, results, number) for number in range(1 + len(states)))
        for final, end in zip(finals, ends, strict=True):
            final.append(end)
    return value, *(emit.call(aten.cat.default, final) for final in finals)
