"""The softmax kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.kernels.gpu import softmax as gpu
from autopar.kernels.softmax import softmax_backward_reference, softmax_reference
from tests.support.kernels.accuracy import GRADIENT_FACTOR, assert_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Rows do not fill their tile, columns are no power of two, one column, one row, no row.
SHAPES = [(2, 3, 5, 7), (3, 130), (1, 1), (1, 1000), (0, 5), (5, 33)]


def masked(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "bool":
        mask = torch.rand(shape) > 0.4
        mask[..., :1, :] = False  # rows that attend to nothing
        return mask
    return torch.randn(shape[-2:]) * 3


def pytorch(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = x * scale
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype != torch.bool:
        return (scores + mask.to(x.dtype)).softmax(-1)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)


def check(x: Tensor, mask: Tensor | None, scale: float = 0.3) -> None:
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(x.dtype)
    ours = gpu.forward(x, mask, scale=scale, dtype=x.dtype)
    exact = pytorch(x.double(), mask, scale)
    assert_accurate(ours, pytorch(x, mask, scale), exact)
    grad_out = torch.randn_like(x)
    ours = gpu.backward(grad_out, ours, scale=scale, dtype=x.dtype)
    gradients: list[Tensor] = []
    for dtype in (x.dtype, torch.float64):
        leaf = x.to(dtype).detach().requires_grad_()
        pytorch(leaf, mask, scale).backward(grad_out.to(dtype))
        assert leaf.grad is not None
        gradients.append(leaf.grad.nan_to_num(0.0))
    assert_accurate(ours, *gradients, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "bool", "added"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    check(torch.randn(shape).to(dtype) * 4, masked(kind, shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "bool", "added"])
def test_long_rows_go_in_chunks(kind: str, dtype: torch.dtype) -> None:
    shape = (3, gpu.MOST_COLUMNS_HELD + 77)
    check(torch.randn(shape).to(dtype) * 4, masked(kind, shape))


@pytest.mark.parametrize("columns", [130, gpu.MOST_COLUMNS_HELD + 77])
@pytest.mark.parametrize("size", [3e4, 1e-6])
def test_huge_and_tiny_values(size: float, columns: int) -> None:
    check(torch.randn(2, columns) * size, None, scale=1.0)


@pytest.mark.parametrize("shape", [(2, 1, 5, 70), (2, 3, 1, 70), (70,), (1, 1, 1, 1), (3, 1, 70), (2, 3, 5, 1)])
def test_masks_are_read_where_they_lie(shape: tuple[int, ...]) -> None:
    x, mask = torch.randn(2, 3, 5, 70), torch.randn(shape)
    ours = gpu.forward(x, mask, scale=0.5, dtype=x.dtype)
    torch.testing.assert_close(ours, softmax_reference(x, mask, scale=0.5, dtype=x.dtype))


def test_a_mask_of_more_dims_than_the_kernel_walks() -> None:
    x, mask = torch.randn(2, 3, 2, 3, 2, 9), torch.rand(2, 1, 2, 1, 2, 9) > 0.3
    ours = gpu.forward(x, mask, scale=1.0, dtype=x.dtype)
    torch.testing.assert_close(ours, softmax_reference(x, mask, scale=1.0, dtype=x.dtype))


def test_inputs_that_are_not_contiguous() -> None:
    x, mask = torch.randn(70, 5, 3).permute(2, 1, 0), (torch.rand(70, 5) > 0.3).T
    ours = gpu.forward(x, mask, scale=1.0, dtype=x.dtype)
    torch.testing.assert_close(ours, softmax_reference(x, mask, scale=1.0, dtype=x.dtype))
    grad_out = torch.randn(5, 3, 70).transpose(0, 1)
    expected = softmax_backward_reference(grad_out, ours, scale=1.0, dtype=x.dtype)
    torch.testing.assert_close(gpu.backward(grad_out, ours, scale=1.0, dtype=x.dtype), expected)


def test_results_of_another_dtype() -> None:
    x = torch.randn(3, 70, dtype=torch.bfloat16)
    ours = gpu.forward(x, None, scale=1.0, dtype=torch.float32)
    torch.testing.assert_close(ours, softmax_reference(x, None, scale=1.0, dtype=torch.float32))
