"""Losses become plain ops in which every sum and every count is a node of its own.

Autograd then derives the backward, and a sum over a split dim is an ordinary reduction: over the batch (ignored labels
counted apart, so unequal shares stay exact) as over the vocabulary (the label is picked by comparison with an `arange`).

    m    = max over classes of the logits, a constant to autograd;    z = logits − m
    loss = where(valid, log Σ exp z − Σ where(class = label, z, 0), 0)
    mean = Σ loss / Σ valid                                            all ignored: 0 / 0 = nan, as torch's
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter, replace, tensor_of
from autopar.ir.program import Program

aten = torch.ops.aten

# The numbers by which ATen schemas name reductions.
_NONE, _MEAN = 0, 1
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DecomposeLosses:
    """Cross entropy, negative log likelihood, squared, absolute, smooth absolute, Huber, soft margin, and binary cross entropy with
    logits.

    Reads: a FORWARD program.
    Writes: plain ATen ops in the place of `aten.<loss>`, computed in float32 for 16-bit inputs and in their dtype otherwise.
    Ensures: none of these losses is left, and every loss has the shape and dtype of torch's. A label outside [0, classes)
        that is not `ignore_index` raises in torch when it runs; here its loss is NaN.
    """

    name: str = "decompose losses"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        for node in list(program.graph.nodes):
            lower = _LOSSES.get(node.target)
            if lower is not None:
                emit = Emitter(program.graph, before=node)
                loss = lower(emit, *node.args, **node.kwargs)
                replace(node, emit.cast(loss, tensor_of(node).dtype))
        return program


def _cross_entropy(
    emit: Emitter,
    logits: Node,
    target: Node,
    weight: Node | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Node:
    classes = _Classes(emit, logits, weight)
    constant = emit.call(aten.amax.default, emit.call(aten.detach.default, classes.values), [classes.dim], True)
    shifted = emit.call(aten.sub.Tensor, classes.values, constant)
    log_sum = emit.call(aten.log.default, classes.sum(emit.call(aten.exp.default, shifted)))
    if tensor_of(target).is_floating_point():
        return _soft_cross_entropy(classes, shifted, log_sum, target, reduction, label_smoothing)
    label_weight = classes.weight_of(target)
    loss = _weighted(emit, emit.call(aten.sub.Tensor, log_sum, classes.pick(shifted, target)), label_weight)
    if label_smoothing:
        even = classes.weighted_sum(shifted, log_sum, classes.weight_row)
        even = emit.call(aten.mul.Tensor, even, label_smoothing / classes.size)
        loss = emit.call(aten.add.Tensor, emit.call(aten.mul.Tensor, loss, 1.0 - label_smoothing), even)
    return reduce_rows(emit, loss, target, classes.size, ignore_index, reduction, label_weight)


def _soft_cross_entropy(classes: _Classes, shifted: Node, log_sum: Node, target: Node, reduction: int, label_smoothing: float) -> Node:
    """Cross entropy with probabilities as `target`."""
    emit = classes.emit
    target = emit.cast(target, tensor_of(shifted).dtype)
    if label_smoothing:
        target = emit.call(aten.mul.Tensor, target, 1.0 - label_smoothing)
        target = emit.call(aten.add.Tensor, target, label_smoothing / classes.size)
    loss = classes.weighted_sum(shifted, log_sum, _weighted(emit, target, classes.weight_row))
    if reduction == _NONE:
        return loss
    total = emit.call(aten.sum.default, loss)
    num_targets = tensor_of(target).numel() // classes.size
    return emit.call(aten.div.Tensor, total, num_targets) if reduction == _MEAN else total


def _negative_log_likelihood(
    emit: Emitter, log_probabilities: Node, target: Node, weight: Node | None = None, reduction: int = _MEAN, ignore_index: int = -100
) -> Node:
    classes = _Classes(emit, log_probabilities, weight)
    label_weight = classes.weight_of(target)
    loss = _weighted(emit, emit.call(aten.neg.default, classes.pick(classes.values, target)), label_weight)
    return reduce_rows(emit, loss, target, classes.size, ignore_index, reduction, label_weight)


class _Classes:
    """Scores over classes, and what is asked of them class by class. Results have no class dim unless said."""

    def __init__(self, emit: Emitter, scores: Node, weight: Node | None) -> None:
        self.emit = emit
        self.values = emit.cast(scores, _exact(tensor_of(scores).dtype))
        shape = tensor_of(scores).shape
        self.dim = 0 if len(shape) == 1 else 1
        self.size = shape[self.dim]
        self._row = [self.size if dim == self.dim else 1 for dim in range(len(shape))]
        self.weight_row: Node | None = None
        if weight is not None:
            self.weight_row = emit.call(aten.view.default, emit.cast(weight, tensor_of(self.values).dtype), self._row)

    def sum(self, value: Node) -> Node:
        return self.emit.call(aten.sum.dim_IntList, value, [self.dim])

    def pick(self, value: Node, target: Node) -> Node:
        """`value` at the class `target` names; 0 where it names none."""
        index = self.emit.call(aten.arange.default, self.size, device=tensor_of(target).device)
        index = self.emit.call(aten.view.default, index, self._row)
        is_label = self.emit.call(aten.eq.Tensor, index, self.emit.call(aten.unsqueeze.default, target, self.dim))
        return self.sum(self.emit.call(aten.where.ScalarOther, is_label, value, 0.0))

    def weight_of(self, target: Node) -> Node | None:
        return None if self.weight_row is None else self.pick(self.weight_row, target)

    def weighted_sum(self, shifted: Node, log_sum: Node, weight: Node | None) -> Node:
        """Σ over classes of weight · (log_sum − shifted); `weight` None is 1 everywhere."""
        log_sum = self.emit.call(aten.unsqueeze.default, log_sum, self.dim)
        return self.sum(_weighted(self.emit, self.emit.call(aten.sub.Tensor, log_sum, shifted), weight))


def _weighted(emit: Emitter, value: Node, weight: Node | None) -> Node:
    return value if weight is None else emit.call(aten.mul.Tensor, value, weight)


def reduce_rows(
    emit: Emitter, loss: Node, target: Node, num_classes: int, ignore_index: int, reduction: int, weight: Node | None = None
) -> Node:
    """The reduction of the loss of every label over those that count; a mean divides by their number, or the sum of their weights."""
    valid = emit.call(aten.ne.Scalar, target, ignore_index)
    is_class = emit.call(aten.bitwise_and.Tensor, emit.call(aten.ge.Scalar, target, 0), emit.call(aten.lt.Scalar, target, num_classes))
    loss = emit.call(aten.where.ScalarOther, is_class, loss, math.nan)
    loss = emit.call(aten.where.ScalarOther, valid, loss, 0.0)
    if reduction == _NONE:
        return loss
    total = emit.call(aten.sum.default, loss)
    if reduction != _MEAN:
        return total
    counted = valid if weight is None else emit.call(aten.where.ScalarOther, valid, weight, 0.0)
    return emit.call(aten.div.Tensor, total, emit.call(aten.sum.default, counted))


def _squared(emit: Emitter, value: Node, target: Node, reduction: int = _MEAN) -> Node:
    difference = _difference(emit, value, target)
    return _reduce(emit, emit.call(aten.mul.Tensor, difference, difference), reduction)


def _absolute(emit: Emitter, value: Node, target: Node, reduction: int = _MEAN) -> Node:
    return _reduce(emit, emit.call(aten.abs.default, _difference(emit, value, target)), reduction)


def _smooth_absolute(emit: Emitter, value: Node, target: Node, reduction: int = _MEAN, beta: float = 1.0) -> Node:
    if beta == 0:
        return _absolute(emit, value, target, reduction)
    return _reduce(emit, _square_then_line(emit, value, target, limit=beta, slope=1.0), reduction)


def _huber(emit: Emitter, value: Node, target: Node, reduction: int = _MEAN, delta: float = 1.0) -> Node:
    return _reduce(emit, _square_then_line(emit, value, target, limit=delta, slope=delta), reduction)


def _square_then_line(emit: Emitter, value: Node, target: Node, limit: float, slope: float) -> Node:
    """A square of the distance below `limit`, a line of `slope` beyond, meeting in value and slope."""
    distance = emit.call(aten.abs.default, _difference(emit, value, target))
    square = emit.call(aten.mul.Tensor, emit.call(aten.mul.Tensor, distance, distance), 0.5 * slope / limit)
    line = emit.call(aten.mul.Tensor, emit.call(aten.sub.Tensor, distance, 0.5 * limit), slope)
    return emit.call(aten.where.self, emit.call(aten.lt.Scalar, distance, limit), square, line)


def _binary_cross_entropy_with_logits(
    emit: Emitter, logits: Node, target: Node, weight: Node | None = None, pos_weight: Node | None = None, reduction: int = _MEAN
) -> Node:
    """(1 − target) · x + (1 + (pos_weight − 1) · target) · log(1 + exp(−x)); `logaddexp` has the right slope at x = 0."""
    exact = _exact(torch.promote_types(tensor_of(logits).dtype, tensor_of(target).dtype))
    logits, target = emit.cast(logits, exact), emit.cast(target, exact)
    negative = emit.call(aten.neg.default, logits)
    softplus = emit.call(aten.logaddexp.default, emit.call(aten.zeros_like.default, negative), negative)
    if pos_weight is not None:
        scale = emit.call(aten.mul.Tensor, emit.call(aten.sub.Tensor, emit.cast(pos_weight, exact), 1.0), target)
        softplus = emit.call(aten.mul.Tensor, softplus, emit.call(aten.add.Tensor, scale, 1.0))
    loss = emit.call(aten.mul.Tensor, emit.call(aten.rsub.Scalar, target, 1.0), logits)
    loss = emit.call(aten.add.Tensor, loss, softplus)
    return _reduce(emit, _weighted(emit, loss, emit.cast(weight, exact) if weight is not None else None), reduction)


def _soft_margin(emit: Emitter, value: Node, target: Node, reduction: int = _MEAN) -> Node:
    """log(1 + exp(−target · x))"""
    exact = _exact(torch.promote_types(tensor_of(value).dtype, tensor_of(target).dtype))
    negative = emit.call(aten.neg.default, emit.call(aten.mul.Tensor, emit.cast(target, exact), emit.cast(value, exact)))
    return _reduce(emit, emit.call(aten.logaddexp.default, emit.call(aten.zeros_like.default, negative), negative), reduction)


def _difference(emit: Emitter, value: Node, target: Node) -> Node:
    exact = _exact(torch.promote_types(tensor_of(value).dtype, tensor_of(target).dtype))
    return emit.call(aten.sub.Tensor, emit.cast(value, exact), emit.cast(target, exact))


def _reduce(emit: Emitter, loss: Node, reduction: int) -> Node:
    if reduction == _NONE:
        return loss
    total = emit.call(aten.sum.default, loss)
    return emit.call(aten.div.Tensor, total, tensor_of(loss).numel()) if reduction == _MEAN else total


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _SIXTEEN_BITS else dtype


_LOSSES: dict[object, Callable[..., Node]] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _negative_log_likelihood,
    aten.nll_loss_nd.default: _negative_log_likelihood,
    aten.nll_loss2d.default: _negative_log_likelihood,
    aten.mse_loss.default: _squared,
    aten.l1_loss.default: _absolute,
    aten.smooth_l1_loss.default: _smooth_absolute,
    aten.huber_loss.default: _huber,
    aten.soft_margin_loss.default: _soft_margin,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
}
