"""The norm kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.kernels.gpu import normalisation as gpu
from tests.support.kernels.accuracy import GRADIENT_FACTOR, assert_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
# Rows do not fill their tile, more tiles of rows than one program takes, one column, no rows.
SHAPES = [(2, 3, 5, 7), (3, 130), (150, 33), (4, 1), (0, 5), (1, 2000)]
LONG = [(2, gpu.MOST_COLUMNS_BACKWARD + 33), (3, gpu.MOST_COLUMNS_FORWARD + 77)]


def pytorch(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, centred: bool) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    functions = torch.nn.functional
    if centred:
        return functions.layer_norm(total, total.shape[-1:], weight, bias, EPS), total
    out = functions.rms_norm(total, total.shape[-1:], weight, EPS)
    return out if bias is None else out + bias, total


def gradients(inputs: list[Tensor | None], dtype: torch.dtype, centred: bool, grads: list[Tensor]) -> list[Tensor | None]:
    leaves = [None if item is None else item.to(dtype).detach().requires_grad_() for item in inputs]
    results = pytorch(*leaves, centred)  # type: ignore[arg-type]
    used = results if inputs[1] is not None else results[:1]
    torch.autograd.backward(used, [grad.to(dtype) for grad in grads[: len(used)]])
    return [None if leaf is None else leaf.grad for leaf in leaves]


def check(shape: tuple[int, ...], dtype: torch.dtype, centred: bool, with_residual: bool, affine: str, size: float = 1.0) -> None:
    x, grad_out, grad_total = (torch.randn(shape).to(dtype) for _ in range(3))
    x = (x * size + 0.3 * size).to(dtype)
    residual = (torch.randn(shape) * size).to(dtype) if with_residual else None
    weight = torch.randn(shape[-1]).to(dtype) if "w" in affine else None
    bias = torch.randn(shape[-1]).to(dtype) if "b" in affine else None
    inputs = [x, residual, weight, bias]
    out, total, mean, reciprocal = gpu.forward(x, residual, weight, bias, eps=EPS, centred=centred)
    exact = [None if item is None else item.double() for item in inputs]
    assert_accurate(out, pytorch(*inputs, centred)[0], pytorch(*exact, centred)[0])  # type: ignore[arg-type]
    if residual is not None:
        assert torch.equal(total, x + residual)
    grads = gpu.backward(
        grad_out, grad_total if with_residual else None, total, mean, reciprocal, weight, centred=centred, has_bias=bias is not None
    )
    same = gradients(inputs, dtype, centred, [grad_out, grad_total])
    best = gradients(inputs, torch.float64, centred, [grad_out, grad_total])
    for ours, one, other in zip(grads, (same[0], *same[2:]), (best[0], *best[2:]), strict=True):
        assert (ours is None) == (one is None)
        if ours is not None and one is not None and other is not None:
            assert_accurate(ours.to(dtype), one, other, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, ...], with_residual: bool, centred: bool, dtype: torch.dtype) -> None:
    check(shape, dtype, centred, with_residual, "wb" if centred else "w")


@pytest.mark.parametrize("affine", ["", "w", "b", "wb"])
@pytest.mark.parametrize("columns", [130, gpu.MOST_COLUMNS_FORWARD + 77])
def test_weights_and_biases(affine: str, columns: int) -> None:
    check((3, columns), torch.float32, True, True, affine)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("shape", LONG)
def test_long_rows_go_in_chunks(shape: tuple[int, ...], with_residual: bool, centred: bool, dtype: torch.dtype) -> None:
    check(shape, dtype, centred, with_residual, "wb")


@pytest.mark.parametrize("size", [1e4, 1e-4])
@pytest.mark.parametrize("columns", [130, gpu.MOST_COLUMNS_FORWARD + 77])
@pytest.mark.parametrize("centred", [True, False])
def test_huge_and_tiny_values(centred: bool, columns: int, size: float) -> None:
    check((2, columns), torch.float32, centred, False, "wb", size)


def test_more_rows_than_partial_sums_take_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_PARTIAL_SUMS", 2)
    check((300, 33), torch.float32, True, True, "wb")
    monkeypatch.setattr(gpu, "MOST_COLUMNS_BACKWARD", 16)
    check((300, 33), torch.float32, True, True, "wb")


def test_inputs_that_are_not_contiguous() -> None:
    x, grad = torch.randn(70, 5).T, torch.randn(70, 5).T
    weight = torch.randn(70, 2)[:, 0]
    out, total, mean, reciprocal = gpu.forward(x, None, weight, None, eps=EPS, centred=True)
    torch.testing.assert_close(out, pytorch(x, None, weight, None, True)[0])
    found = gpu.backward(grad, None, x, mean, reciprocal, weight, centred=True, has_bias=False)[0]
    torch.testing.assert_close(found, gradients([x, None, weight, None], torch.float32, True, [grad])[0])
