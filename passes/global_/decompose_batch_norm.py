"""Batch norm becomes sums over the global batch: they may be split over it and reduced, which the fused op may not.

    forward    mean = Σ x / n      variance = Σ (x − mean)² / n      r = rsqrt(variance + eps)
               y = (x − mean) · (r · weight) + bias
    backward   b = Σ g             w = Σ g · (x − mean) · r
               x gradient = (g − b / n − (x − mean) · r · w / n) · (r · weight)

n counts samples and positions of the global batch; sums run over all dims but the channels. The variance takes a second
sum, of deviations: Σ x² / n − mean² would cancel. In evaluation mean and variance are constants. The formulas are autograd's
own, see `torch/_decomp/decompositions.py` (native_batch_norm_backward).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter
from autopar.ir.arguments import arguments, int_at, node_at
from autopar.ir.program import Program, results_of

aten = torch.ops.aten
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DecomposeBatchNorm:
    """Write batch norm that takes statistics, and the backward of every batch norm, as sums, counts and pointwise ops.

    Reads: val. Writes: val, PHASE, SOURCE of new nodes; 16-bit inputs are normalised in float32, as torch does.
    Ensures: no batch norm with statistics of its input is left; outputs, buffers and gradients have the dtypes they had.
    """

    name: str = "decompose batch norm"

    def apply(self, program: Program) -> Program:
        if not any(node.op == "call_function" and str(node.target) in _LOWERED for node in program.graph.nodes):
            return program
        program = program.copy()
        for node in list(program.graph.nodes):
            lower = _LOWERED.get(str(node.target)) if node.op == "call_function" else None
            if lower is not None:
                _replace_results(node, lower(Emitter(program.graph, before=node), node, program.mesh.num_microbatches))
        remove_dead_code(program.graph)
        return program


def _replace_results(node: Node, results: Sequence[Node | None]) -> None:
    """Let `results` stand for what the getitems of `node` select."""
    for user in list(node.users):
        assert user.target is operator.getitem
        if user.users:
            found = results[int_at(user, 1)]
            assert found is not None
            user.replace_all_uses_with(found)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


@dataclass(frozen=True)
class _Channels:
    """Arithmetic with one number a channel, on a value [n, c, …]; everything is in the dtype of `values`."""

    emit: Emitter
    values: Node

    @staticmethod
    def of(emit: Emitter, x: Node) -> _Channels:
        dtype = x.meta["val"].dtype
        return _Channels(emit, emit.cast(x, torch.float32 if dtype in _SIXTEEN_BITS else dtype))

    @property
    def shape(self) -> list[int]:
        return list(self.values.meta["val"].shape)

    @property
    def count(self) -> int:
        """Samples and positions that a channel has."""
        return math.prod(self.shape) // self.shape[1]

    def row(self, channel: Node) -> Node:
        """[c] → [1, c, 1, …], in the dtype of the values."""
        row = [self.shape[1] if dim == 1 else 1 for dim in range(len(self.shape))]
        return self.emit.call(aten.view.default, self.emit.cast(channel, self.values.meta["val"].dtype), row)

    def sum(self, value: Node) -> Node:
        """[n, c, …] → [c]."""
        return self.emit.call(aten.sum.dim_IntList, value, [dim for dim in range(len(self.shape)) if dim != 1])

    def mean(self, value: Node) -> Node:
        return self.emit.call(aten.div.Tensor, self.sum(value), self.count)

    def less(self, value: Node, channel: Node) -> Node:
        return self.emit.call(aten.sub.Tensor, value, self.row(channel))

    def times(self, value: Node, channel: Node) -> Node:
        return self.emit.call(aten.mul.Tensor, value, self.row(channel))

    def scale(self, deviation: Node, weight: Node | None) -> Node:
        """Reciprocal deviation times weight, [c]."""
        return deviation if weight is None else self.emit.call(aten.mul.Tensor, deviation, weight)


def _with_buffers(emit: Emitter, node: Node, number: int) -> list[Node | None]:
    """(input, weight?, bias?, mean, variance, training, momentum, eps) → (output, mean, deviation, new mean, new variance).

    The running variance is that of a microbatch, whose samples are a part of the batch: `number` of them.
    """
    x, weight, bias, old_mean, old_variance, training, momentum, eps = arguments(node)
    assert training, "in evaluation autograd calls another op"
    output, mean, deviation, variance = _normalised(emit, x, weight, bias, eps)
    count = _Channels.of(emit, x).count // (1 if _is_of_instances(x) else number)
    unbiased = emit.call(aten.mul.Tensor, variance, count / (count - 1)) if count > 1 else variance
    return [output, mean, deviation, _moved(emit, old_mean, mean, momentum), _moved(emit, old_variance, unbiased, momentum)]


def _is_of_instances(x: Node) -> bool:
    """Whether a batch norm is one of instances, as torch writes it: of [n, c, …] seen as one sample of n · c channels."""
    if x.target not in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return False
    seen, source = x.meta["val"].shape, node_at(x, 0).meta["val"].shape
    return len(seen) == len(source) and (seen[0], seen[1]) == (1, source[0] * source[1]) and seen[2:] == source[2:]


def _without_buffers(emit: Emitter, node: Node, number: int) -> list[Node | None]:
    """(input, weight?, bias?, training, momentum, eps) → (output, mean, deviation)."""
    x, weight, bias, _, _, eps = arguments(node)
    return list(_normalised(emit, x, weight, bias, eps)[:3])


def _normalised(emit: Emitter, x: Node, weight: Node | None, bias: Node | None, eps: float) -> tuple[Node, Node, Node, Node]:
    """Output, mean, reciprocal deviation and variance."""
    channels = _Channels.of(emit, x)
    mean = channels.mean(channels.values)
    centred = channels.less(channels.values, mean)
    variance = channels.mean(emit.call(aten.mul.Tensor, centred, centred))
    deviation = emit.call(aten.rsqrt.default, emit.call(aten.add.Tensor, variance, eps))
    output = channels.times(centred, channels.scale(deviation, weight))
    if bias is not None:
        output = emit.call(aten.add.Tensor, output, channels.row(bias))
    return emit.cast(output, x.meta["val"].dtype), mean, deviation, variance


def _moved(emit: Emitter, old: Node, new: Node, momentum: float) -> Node:
    """The running statistic, moved towards the batch's."""
    kept = emit.call(aten.mul.Tensor, old, 1 - momentum)
    return emit.call(aten.add.Tensor, kept, emit.call(aten.mul.Tensor, emit.cast(new, old.meta["val"].dtype), momentum))


def _backward(emit: Emitter, node: Node, number: int) -> list[Node | None]:
    """(gradient, input, weight?, mean?, variance?, saved mean?, saved deviation?, training, eps, mask) → three gradients."""
    gradient, x, weight, fixed_mean, fixed_variance, mean, deviation, training, eps, _ = arguments(node)
    channels = _Channels.of(emit, x)
    dtype = channels.values.meta["val"].dtype
    g = emit.cast(gradient, dtype)
    if not training:
        assert isinstance(fixed_variance, Node)
        mean, deviation = fixed_mean, emit.call(aten.rsqrt.default, emit.call(aten.add.Tensor, emit.cast(fixed_variance, dtype), eps))
    assert isinstance(mean, Node) and isinstance(deviation, Node)
    centred = channels.less(channels.values, mean)
    total = channels.sum(g)
    along = emit.call(aten.mul.Tensor, channels.sum(emit.call(aten.mul.Tensor, g, centred)), deviation)
    inner = g
    if training:
        slope = emit.call(aten.div.Tensor, emit.call(aten.mul.Tensor, along, deviation), channels.count)
        inner = channels.less(g, emit.call(aten.div.Tensor, total, channels.count))
        inner = emit.call(aten.sub.Tensor, inner, channels.times(centred, slope))
    gradients = (channels.times(inner, channels.scale(deviation, weight)), along, total)
    return [emit.cast(found, value.dtype) if value is not None else None for found, value in zip(gradients, results_of(node), strict=True)]


_LOWERED = {
    "aten._native_batch_norm_legit_functional.default": _with_buffers,
    "aten._native_batch_norm_legit.no_stats": _without_buffers,
    "aten.native_batch_norm_backward.default": _backward,
}
