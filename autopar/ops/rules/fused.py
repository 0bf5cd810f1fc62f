"""Our fused ops besides attention: `autopar/kernels/softmax.py`, `normalisation.py` and their neighbours.

Rows are split as one likes; the last dim, over which these ops reduce, is blocked but for the classes of cross entropy.
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from autopar.ir.program import operands
from autopar.ops.rule import Labels, Rule, rule
from autopar.ops.rules.labels import aligned, argument, blocked, broadcast, positional, shape_of, without


def _rows(x: Any) -> Labels:
    """Labels of [..., N], N blocked."""
    num_dims = len(shape_of(x))
    return without(positional(num_dims), [num_dims - 1])


def _linear_in(node: Node, *values: Any) -> tuple[frozenset[int], ...]:
    """One linear set: the op is linear in these operands together. They are its first, in this order, where one stands several times."""
    inputs, found = operands(node), list[int]()
    for value in values:
        if isinstance(value, Node):
            found.append(next(place for place, each in enumerate(inputs) if each is value and place not in found))
    return (frozenset(found),)


@rule("autopar.softmax.default")
def softmax(node: Node) -> Rule:
    """(x[..., N], mask?) → [..., N]."""
    x, mask = node.args[0], argument(node, 1, "mask")
    labels = _rows(x)
    pairs: list[tuple[Any, Labels]] = [(x, labels)]
    if isinstance(mask, Node):
        kept = broadcast(shape_of(mask), shape_of(x))
        pairs.append((mask, tuple(label if label in labels else None for label in kept)))
    return Rule(aligned(node, pairs), (labels,))


@rule("autopar.softmax_backward.default")
def softmax_backward(node: Node) -> Rule:
    """(gradient, out) → gradient of x."""
    gradient, out = node.args[:2]
    labels = _rows(out)
    return Rule((labels, labels), (labels,), linear=_linear_in(node, gradient))


@rule("autopar.norm.default", "autopar.add_norm.default")
def norm(node: Node) -> Rule:
    """(x[..., N], residual?, weight[N]?, bias[N]?) → (out, x + residual?, mean[...], reciprocal[...])."""
    labels = _rows(node.args[0])
    adds = str(node.target).startswith("autopar.add")
    pairs = [(x, labels) for x in node.args[: 1 + adds]] + [(item, blocked(1)) for item in node.args[1 + adds :]]
    return Rule(aligned(node, pairs), (*(labels,) * (1 + adds), labels[:-1], labels[:-1]))


@rule("autopar.norm_backward.default")
def norm_backward(node: Node) -> Rule:
    """(gradient of out, gradient of the sum?, sum, mean, reciprocal, weight?) → gradients of x, weight and bias, the latter two summed."""
    grad_out, grad_total, total, mean, reciprocal, weight = node.args
    labels = _rows(total)
    pairs = [(grad_out, labels), (grad_total, labels), (total, labels), (mean, labels[:-1]), (reciprocal, labels[:-1])]
    order = aligned(node, [*pairs, (weight, blocked(1))])
    return Rule(order, (labels, blocked(1), blocked(1)), linear=_linear_in(node, grad_out, grad_total))


@rule("autopar.cross_entropy.default")
def cross_entropy(node: Node) -> Rule:
    """(logits[..., V], labels[...], classes[V]) → (log_sum_exp[...], picked[...], total[...]): numbers of rows, unreduced over V."""
    labels = positional(len(shape_of(node.args[0])))
    rows, classes = labels[:-1], str(labels[-1])
    return Rule((labels, rows, (classes,)), (rows,) * 3, reductions={classes: ("logsumexp", "sum", "sum")})


@rule("autopar.cross_entropy_backward.default")
def cross_entropy_backward(node: Node) -> Rule:
    """(gradients of the results[...], logits[..., V], labels[...], classes[V], log_sum_exp[...]) → gradient of the logits."""
    gradients, logits = node.args[:3], node.args[3]
    labels = positional(len(shape_of(logits)))
    rows, classes = labels[:-1], labels[-1]
    pairs = [*((gradient, rows) for gradient in gradients), (logits, labels)]
    pairs += zip(node.args[4:], (rows, (classes,), rows), strict=True)
    return Rule(aligned(node, pairs), (labels,), linear=_linear_in(node, *gradients))


@rule("autopar.projected_cross_entropy.default")
def projected_cross_entropy(node: Node) -> Rule:
    """(hidden[..., K], weight[V, K], labels[...], classes[V]) → as cross entropy; what is inside a softmax cannot be split over K."""
    hidden, weight = node.args[:2]
    rows = positional(len(shape_of(hidden)) - 1)
    flops = 2.0 * math.prod(shape_of(hidden)) * shape_of(weight)[0]
    sources = ((*rows, None), ("v", None), rows, ("v",))
    return Rule(sources, (rows,) * 3, reductions={"v": ("logsumexp", "sum", "sum")}, flops=flops)


@rule("autopar.projected_cross_entropy_backward.default")
def projected_cross_entropy_backward(node: Node) -> Rule:
    """(gradients[...], hidden[..., K], weight[V, K], labels[...], classes[V], log_sum_exp[...]) → gradients of hidden and weight."""
    gradients, (hidden, weight) = node.args[:3], node.args[3:5]
    rows = positional(len(shape_of(hidden)) - 1)
    pairs = [*((gradient, rows) for gradient in gradients), (hidden, (*rows, None)), (weight, ("v", None))]
    pairs += zip(node.args[5:], (rows, ("v",), rows), strict=True)
    flops = 6.0 * math.prod(shape_of(hidden)) * shape_of(weight)[0]
    return Rule(aligned(node, pairs), ((*rows, None), ("v", None)), linear=_linear_in(node, *gradients), flops=flops)


@rule("autopar.gated.default")
def gated(node: Node) -> Rule:
    """(gate, up) → activation(gate) · up, element by element. Linear in the second, which may be the first, too."""
    labels = positional(len(shape_of(node.args[0])))
    return Rule((labels, labels), (labels,), linear=(frozenset({1}),))


@rule("autopar.gated_backward.default")
def gated_backward(node: Node) -> Rule:
    """(gradient, gate, up) → gradients of gate and up."""
    labels = positional(len(shape_of(node.args[1])))
    return Rule((labels,) * 3, (labels, labels), linear=_linear_in(node, node.args[0]))


@rule("autopar.bias_activation.default")
def bias_activation(node: Node) -> Rule:
    """(x[..., N], bias[N]) → activation(x + bias)."""
    labels = positional(len(shape_of(node.args[0])))
    return Rule((labels, labels[-1:]), (labels,))


@rule("autopar.bias_activation_backward.default")
def bias_activation_backward(node: Node) -> Rule:
    """(gradient, x[..., N], bias[N]) → gradients of x and bias, the latter summed over rows."""
    labels = positional(len(shape_of(node.args[1])))
    return Rule((labels, labels, labels[-1:]), (labels, labels[-1:]), linear=_linear_in(node, node.args[0]))


@rule("autopar.dropout.default", "autopar.add_dropout.default")
def dropout(node: Node) -> Rule:
    """(x[..., N], residual[..., N]?, rows[..., 1], second[..., 1], columns[N]) → [..., N], element by element."""
    *values, rows, second, columns = node.args
    shape = shape_of(values[0])
    labels = positional(len(shape))
    pairs = [*((value, labels) for value in values), (columns, labels[-1:])]
    pairs += [(each, _one_a_row(shape_of(each), shape)) for each in (rows, second)]
    return Rule(aligned(node, pairs), (labels,), linear=_linear_in(node, *values))


def _one_a_row(sizes: tuple[int, ...], shape: tuple[int, ...]) -> Labels:
    """Labels of what broadcasts to [..., 1], against those of [..., N]."""
    return (*broadcast(sizes[:-1], shape[:-1]), None) if sizes else ()


@rule("autopar.rotary.default", "autopar.rotary_backward.default")
def rotary(node: Node) -> Rule:
    """(x[b, h, s, D], cos, sin), which broadcast to [b, h, s, R] → [b, h, s, D]."""
    x, cos, sin = node.args
    labels, shape = _rows(x), shape_of(x)
    outer = [broadcast(shape_of(angle)[:-1], shape[:-1]) for angle in (cos, sin)]
    return Rule((labels, *((*found, None) for found in outer)), (labels,), linear=_linear_in(node, x))
