"""Convolutions without a bias of their own: the same numbers, and input channels that may be split."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops.strategies import factors_of
from autopar.passes.global_.decompose_convolutions import DecomposeConvolutions
from tests.support.graphs import find, ops, traced, values, with_atoms

aten = torch.ops.aten
X, WEIGHT, BIAS = torch.randn(4, 6, 8, 8).double(), torch.randn(4, 6, 3, 3).double(), torch.randn(4).double()
GRADIENT = torch.randn(4, 4, 8, 8).double()
LITERALS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return aten.convolution(x, weight, bias, *LITERALS)


def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> object:
    return aten.convolution_backward(gradient, x, weight, [4], *LITERALS, [True, True, True])


def test_the_bias_is_added_apart() -> None:
    before = traced(forward, X, WEIGHT, BIAS, parameters=(1, 2))
    after = DecomposeConvolutions().apply(before)
    assert ops(after) == ["aten.convolution.default", "aten.view.default", "aten.add.Tensor"]
    torch.testing.assert_close(values(after, X, WEIGHT, BIAS), values(before, X, WEIGHT, BIAS), rtol=1e-12, atol=1e-12)
    (product,) = find(with_atoms(after), aten.convolution.default)
    assert {factor.name for factor in factors_of(product)} == {"n", "c", "o"}


def test_the_gradient_of_the_bias_is_a_sum() -> None:
    before = traced(backward, GRADIENT, X, WEIGHT, parameters=(2,))
    after = DecomposeConvolutions().apply(before)
    assert sorted(ops(after)) == ["<built-in function getitem>"] * 2 + ["aten.convolution_backward.default", "aten.sum.dim_IntList"]
    torch.testing.assert_close(values(after, GRADIENT, X, WEIGHT), values(before, GRADIENT, X, WEIGHT), rtol=1e-12, atol=1e-12)
    (product,) = find(with_atoms(after), aten.convolution_backward.default)
    assert {factor.name for factor in factors_of(product)} == {"n", "c", "o"}


def test_a_bias_that_trains_alone_needs_no_backward_of_the_convolution() -> None:
    def function(gradient: Tensor, x: Tensor, weight: Tensor) -> object:
        return aten.convolution_backward(gradient, x, weight, [4], *LITERALS, [False, False, True])[2]

    assert ops(DecomposeConvolutions().apply(traced(function, GRADIENT, X, WEIGHT))) == ["aten.sum.dim_IntList"]


def test_convolutions_without_bias_stay() -> None:
    before = traced(lambda x, weight: aten.convolution(x, weight, None, *LITERALS), X, WEIGHT)
    assert ops(DecomposeConvolutions().apply(before)) == ops(before)
