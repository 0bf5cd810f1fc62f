"""Layer norm, RMS norm and batch norm: the dims that statistics run over are blocked."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autopar.ir.arguments import int_at, list_at, node_at
from autopar.ir.program import operands, results_of
from autopar.ops.rule import Label, Labels, Rule, rule
from autopar.ops.rules.labels import aligned, argument, aten, blocked, position_at, positional, shape_of, value_of, without


def _outer(num_dims: int, num_normalised: int) -> Labels:
    return without(positional(num_dims), range(num_dims - num_normalised, num_dims))


@rule(aten.native_layer_norm.default)
def layer_norm(node: Node) -> Rule:
    """(input, shape, weight?, bias?, eps) → (output, mean, reciprocal deviation)."""
    x, num_normalised = node_at(node, 0), len(list_at(node, 1))
    labels = _outer(len(shape_of(x)), num_normalised)
    affine = blocked(num_normalised)
    operands = aligned(node, [(x, labels), (argument(node, 2, "weight"), affine), (argument(node, 3, "bias"), affine)])
    return Rule(operands, (labels, labels, labels))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(node: Node) -> Rule:
    """(gradient, input, shape, mean, deviation, weight?, bias?, mask) → (input, weight, bias) gradients, the latter two summed."""
    gradient, x, _, mean, deviation = node.args[:5]
    num_normalised = len(list_at(node, 2))
    labels, affine = _outer(len(shape_of(x)), num_normalised), blocked(num_normalised)
    weight, bias = argument(node, 5, "weight"), argument(node, 6, "bias")
    pairs = [(gradient, labels), (x, labels), (mean, labels), (deviation, labels), (weight, affine), (bias, affine)]
    return Rule(aligned(node, pairs), _present(node, (labels, affine, affine)), linear=(position_at(node, 0),))


@rule("aten._fused_rms_norm.default")
def rms_norm(node: Node) -> Rule:
    """(input, shape, weight?, eps) → (output, reciprocal deviation)."""
    x, num_normalised = node_at(node, 0), len(list_at(node, 1))
    labels = _outer(len(shape_of(x)), num_normalised)
    return Rule(aligned(node, [(x, labels), (argument(node, 2, "weight"), blocked(num_normalised))]), (labels, labels))


@rule("aten._fused_rms_norm_backward.default")
def rms_norm_backward(node: Node) -> Rule:
    """(gradient, input, shape, deviation, weight?, mask) → (input, weight) gradients."""
    gradient, x, _, deviation = node.args[:4]
    num_normalised = len(list_at(node, 2))
    labels, affine = _outer(len(shape_of(x)), num_normalised), blocked(num_normalised)
    pairs = [(gradient, labels), (x, labels), (deviation, labels), (argument(node, 4, "weight"), affine)]
    return Rule(aligned(node, pairs), _present(node, (labels, affine)), linear=(position_at(node, 0),))


def _present(node: Node, results: tuple[Labels, ...]) -> tuple[Labels, ...]:
    """`results` with `()` for those that the node leaves out."""
    return tuple(labels if value is not None else () for labels, value in zip(results, results_of(node), strict=True))


_BATCH_NORM = (
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats",
    aten.native_batch_norm_backward.default,
)


@rule(*_BATCH_NORM)
def batch_norm(node: Node) -> Rule:
    """Statistics run over everything but the channels, dim 1 of tensors of several dims; the others are one number a channel."""
    linear = (frozenset({0}),) if node.target is aten.native_batch_norm_backward.default else ()
    sources = tuple(_statistics_of(value_of(operand)) for operand in operands(node))
    return Rule(sources, tuple(_statistics_of(value) for value in results_of(node)), linear=linear)


def _statistics_of(value: torch.Tensor | None) -> Labels:
    """Fixed statistics leave the saved ones empty."""
    return _channels(value.dim()) if value is not None and value.numel() else _nothing(value)


def _channels(num_dims: int) -> Labels:
    return ("c",) if num_dims == 1 else (None, "c", *blocked(num_dims - 2))


def _nothing(value: torch.Tensor | None) -> Labels:
    """Labels of a result that is left out, or empty."""
    return blocked(value.dim() if value is not None else 0)


@rule("aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference(node: Node) -> Rule:
    """(input, weight?, bias?, mean, variance, …): fixed statistics, every position by itself."""
    x = node.args[0]
    labels = ("n", "c", *positional(len(shape_of(x)) - 2))
    order = aligned(node, [(x, labels), *((argument, ("c",)) for argument in node.args[1:5])])
    return Rule(order, (labels, *(_nothing(value) for value in results_of(node)[1:])))


def _groups(x: Any, groups: int) -> tuple[Labels, Label, dict[str, int]]:
    """Labels of the input and of its channels, and the sizes of groups and of the channels in one, over which statistics run."""
    num_dims, size = len(shape_of(x)), shape_of(x)[1] // groups
    channels: Label = ("g", "r") if size > 1 else "g"
    return ("n", channels, *blocked(num_dims - 2)), channels, {"g": groups, "r": size}


_IN_A_GROUP = frozenset({"r"})


@rule(aten.native_group_norm.default)
def group_norm(node: Node) -> Rule:
    """(input, weight?, bias?, n, c, positions, groups, eps) → (output, mean[n, groups], reciprocal deviation)."""
    x = node.args[0]
    labels, channels, sizes = _groups(x, int_at(node, 6))
    order = aligned(node, [(x, labels), (node.args[1], (channels,)), (node.args[2], (channels,))])
    return Rule(order, (labels, ("n", "g"), ("n", "g")), _IN_A_GROUP, sizes=sizes)


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(node: Node) -> Rule:
    """(gradient, input, mean, deviation, weight?, n, c, positions, groups, mask) → (input, weight, bias) gradients."""
    gradient, x, mean, deviation, weight = node.args[:5]
    labels, channels, sizes = _groups(x, int_at(node, 8))
    statistics = ("n", "g")
    pairs: list[tuple[Any, Labels]] = [
        (gradient, labels), (x, labels), (mean, statistics), (deviation, statistics), (weight, (channels,)),
    ]  # fmt: skip
    results = _present(node, (labels, (channels,), (channels,)))
    return Rule(aligned(node, pairs), results, _IN_A_GROUP, linear=(position_at(node, 0),), sizes=sizes)
