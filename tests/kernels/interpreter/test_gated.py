"""The kernels of gated and biased activations against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.kernels.gated import ACTIVATIONS
from autopar.kernels.gpu import gated as gpu
from tests.support.kernels.accuracy import GRADIENT_FACTOR, assert_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(2, 3, 7), (70, 130), (1, 1), (0, 5)]


def check(function: Callable[..., Tensor], out: Tensor, grads: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor], grad: Tensor) -> None:
    dtype = out.dtype
    runs: list[tuple[Tensor, ...]] = []
    for precision in (dtype, torch.float64):
        leaves = [item.to(precision).detach().requires_grad_() for item in inputs]
        result = function(*leaves)
        runs.append((result.detach(), *torch.autograd.grad(result, leaves, grad.to(precision))))
    same, exact = runs
    assert_accurate(out, same[0], exact[0])
    for ours, one, other in zip(grads, same[1:], exact[1:], strict=True):
        assert_accurate(ours.to(dtype), one, other, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation: str, shape: tuple[int, ...], dtype: torch.dtype, size: float = 2.0) -> None:
    gate, up, grad = ((torch.randn(shape) * size).to(dtype) for _ in range(3))
    options: dict[str, Any] = {"activation": activation}
    grads = gpu.gated_backward(grad, gate, up, **options)
    check(lambda gate, up: ACTIVATIONS[activation](gate) * up, gpu.gated(gate, up, **options), grads, (gate, up), grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_bias_activation(activation: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, bias, grad = ((torch.randn(size) * 2).to(dtype) for size in (shape, shape[-1:], shape))
    options: dict[str, Any] = {"activation": activation}
    grads = gpu.bias_activation_backward(grad, x, bias, **options)
    check(lambda x, bias: ACTIVATIONS[activation](x + bias), gpu.bias_activation(x, bias, **options), grads, (x, bias), grad)


@pytest.mark.parametrize("size", [1e4, 1e-4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_huge_and_tiny_values(activation: str, size: float) -> None:
    test_gated(activation, (3, 70), torch.float32, size)


def test_more_rows_than_strips_take_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_STRIPS", 2)
    test_bias_activation("gelu", (150, 7), torch.float32)


def test_inputs_that_are_not_contiguous() -> None:
    gate, up = torch.randn(70, 3).T, torch.randn(70, 3).T
    torch.testing.assert_close(gpu.gated(gate, up, activation="silu"), torch.nn.functional.silu(gate) * up)
