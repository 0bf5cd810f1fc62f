"""Fourier transforms and decompositions of matrices: the dims that are transformed are blocked, the others pass."""

from __future__ import annotations

from torch.fx import Node

from autopar.ops.rule import Rule, rule
from autopar.ops.rules.labels import aten, dims_of, positional, shape_of, without


@rule(aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
def fourier(node: Node) -> Rule:
    """(input, dims, …)"""
    num_dims = len(shape_of(node))
    labels = without(positional(num_dims), dims_of(node.args[1], num_dims))
    return Rule((labels,), (labels,), linear=(frozenset({0}),))
