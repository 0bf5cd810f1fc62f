"""Convolutions, pooling and resampling: batch and channels may be split, space may not (no halos are exchanged)."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from autopar.program import operands, results_of
from autopar.rule import Labels, Rule, rule
from autopar.rules.labels import aligned, argument, aten, blocked, numel, position_of, positional, shape_of


def _labels(node: Node, first: Any, transposed: bool, groups: int) -> tuple[Labels, Labels, Labels]:
    """Labels of the input, the weight and the output."""
    space = blocked(len(shape_of(first)) - 2)
    if transposed or groups != 1:
        return ("n", None, *space), (None, None, *space), ("n", None, *space)
    return ("n", "c", *space), ("o", "c", *space), ("n", "o", *space)


def _flops(weight: Any, output: Any, x: Any, transposed: bool) -> float:
    """Of one product: every position of the output (of the input when transposed) times the weight of a group."""
    shape = shape_of(x) if transposed else tuple(output)
    return 2.0 * numel((shape[0], *shape[2:])) * numel(shape_of(weight))


@rule(aten.convolution.default)
def convolution(node: Node) -> Rule:
    """(input, weight, bias?, stride, padding, dilation, transposed, output_padding, groups)."""
    x, weight, bias = node.args[:3]
    transposed, groups = bool(argument(node, 6, "transposed")), int(argument(node, 8, "groups"))
    x_labels, weight_labels, labels = _labels(node, x, transposed, groups)
    order = aligned(node, [(x, x_labels), (weight, weight_labels), (bias, labels[1:2])])
    # Every rank of a split over input channels would add the bias once more.
    whole = frozenset({"c"}) if isinstance(bias, Node) else frozenset[str]()
    added = position_of(node, bias)
    linear = (position_of(node, x) | added, position_of(node, weight) | added)
    return Rule(order, (labels,), whole, linear=linear, flops=_flops(weight, shape_of(node), x, transposed))


@rule(aten.convolution_backward.default)
def convolution_backward(node: Node) -> Rule:
    """(gradient, input, weight, bias_sizes, …) → (input, weight, bias) gradients, those asked for by the mask."""
    gradient, x, weight = node.args[:3]
    transposed, groups = bool(argument(node, 7, "transposed")), int(argument(node, 9, "groups"))
    x_labels, weight_labels, labels = _labels(node, gradient, transposed, groups)
    order = aligned(node, [(gradient, labels), (x, x_labels), (weight, weight_labels)])
    values = results_of(node)
    results = tuple(kept if value is not None else () for kept, value in zip((x_labels, weight_labels, labels[1:2]), values, strict=True))
    # The bias gradient is no sum over input channels: ranks that split them all hold it whole.
    whole = frozenset({"c"}) if values[2] is not None else frozenset[str]()
    products = sum(value is not None for value in values[:2])
    flops = products * _flops(weight, shape_of(gradient), x, transposed)
    return Rule(order, results, whole, linear=(position_of(node, gradient),), flops=flops)


# Each output a fixed weighted sum of inputs of its own image and channel.
_LINEAR = (
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_bicubic2d_backward.default,
)


@rule(aten.max_pool2d_with_indices.default, *_LINEAR)
def pooling(node: Node) -> Rule:
    """Batch and channels pass; the last two dims are space."""
    linear = (frozenset({0}),) if node.target in _LINEAR else ()
    labels = tuple((*positional(len(shape_of(operand)) - 2), None, None) for operand in operands(node))
    return Rule(labels, (labels[0],) * len(results_of(node)), linear=linear)
