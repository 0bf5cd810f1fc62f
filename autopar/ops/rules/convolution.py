"""Convolutions: batch, channels and groups may be split, space may not (no halos are exchanged)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from autopar.ir.program import results_of
from autopar.ops.rule import Label, Labels, Rule, rule
from autopar.ops.rules.labels import aligned, argument, aten, blocked, numel, position_at, shape_of


@dataclass(frozen=True)
class _Spaces:
    """Labels of the input, the weight and the output, and sizes of those that share a dim.

    g  groups        c  input channels of a group        o  output channels of a group
    """

    x: Labels
    weight: Labels
    output: Labels
    sizes: dict[str, int]


def _spaces(first: Any, weight: Any, transposed: bool, groups: int) -> _Spaces:
    """`first` is the input or the output; a weight is [o, c / groups, …], a transposed one [c, o / groups, …]."""
    space, shape = blocked(len(shape_of(first)) - 2), shape_of(weight)
    outer, inner = ("c", "o") if transposed else ("o", "c")
    sizes = {"g": groups, outer: shape[0] // groups, inner: shape[1]}

    def channels(label: str) -> Label:
        if groups == 1:
            return label
        return ("g", label) if sizes[label] > 1 else "g"

    return _Spaces(("n", channels("c"), *space), (channels(outer), inner, *space), ("n", channels("o"), *space), sizes)


def _flops(weight: Any, output: Any, x: Any, transposed: bool) -> float:
    """Of one product: every position of the output (of the input when transposed) times the weight of a group."""
    shape = shape_of(x) if transposed else tuple(output)
    return 2.0 * numel((shape[0], *shape[2:])) * numel(shape_of(weight))


@rule(aten.convolution.default)
def convolution(node: Node) -> Rule:
    """(input, weight, bias?, stride, padding, dilation, transposed, output_padding, groups)."""
    x, weight, bias = node.args[:3]
    transposed, groups = bool(argument(node, 6, "transposed")), int(argument(node, 8, "groups"))
    spaces = _spaces(x, weight, transposed, groups)
    order = aligned(node, [(x, spaces.x), (weight, spaces.weight), (bias, spaces.output[1:2])])
    # Every rank of a split over input channels would add the bias once more.
    whole = frozenset({"c"}) if isinstance(bias, Node) else frozenset[str]()
    added = position_at(node, 2)
    linear = (position_at(node, 0) | added, position_at(node, 1) | added)
    flops = _flops(weight, shape_of(node), x, transposed)
    return Rule(order, (spaces.output,), whole, linear=linear, flops=flops, sizes=spaces.sizes)


@rule(aten.convolution_backward.default)
def convolution_backward(node: Node) -> Rule:
    """(gradient, input, weight, bias_sizes, …) → (input, weight, bias) gradients, those asked for by the mask."""
    gradient, x, weight = node.args[:3]
    transposed, groups = bool(argument(node, 7, "transposed")), int(argument(node, 9, "groups"))
    spaces = _spaces(gradient, weight, transposed, groups)
    order = aligned(node, [(gradient, spaces.output), (x, spaces.x), (weight, spaces.weight)])
    values = results_of(node)
    wanted = zip((spaces.x, spaces.weight, spaces.output[1:2]), values, strict=True)
    results = tuple(labels if value is not None else () for labels, value in wanted)
    # The bias gradient is no sum over input channels: ranks that split them all hold it whole.
    whole = frozenset({"c"}) if values[2] is not None else frozenset[str]()
    products = sum(value is not None for value in values[:2])
    flops = products * _flops(weight, shape_of(gradient), x, transposed)
    return Rule(order, results, whole, linear=(position_at(node, 0),), flops=flops, sizes=spaces.sizes)
