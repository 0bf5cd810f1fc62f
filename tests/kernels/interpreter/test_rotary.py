"""The rotary kernel against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.kernels.gpu import rotary as gpu
from autopar.kernels.rotary import rotary_backward_reference, rotary_reference
from tests.support.kernels.accuracy import GRADIENT_FACTOR, assert_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# B, H, S, D, R
SHAPES = [(2, 3, 7, 16, 16), (1, 2, 130, 64, 64), (2, 3, 5, 80, 24), (1, 1, 1, 2, 2), (0, 2, 3, 8, 8), (1, 2, 3, 96, 96)]


def plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation in the dtype of x, every op rounding."""
    turning, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-turning.chunk(2, -1)[1], turning.chunk(2, -1)[0]), -1)
    return torch.cat((turning * cos + turned * sin, tail), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, ...], interleaved: bool, dtype: torch.dtype, size: float = 1.0) -> None:
    *shape_x, rotated = shape
    x = (torch.randn(shape_x).transpose(1, 2).contiguous().transpose(1, 2) * size).to(dtype)
    cos, sin = (torch.randn(shape[2], rotated).to(dtype) for _ in range(2))
    exact = (x.double().requires_grad_(), cos.double(), sin.double())
    same = (x.detach().requires_grad_(), cos, sin)
    want, plainly = plain(*exact, interleaved), plain(*same, interleaved)
    assert_accurate(gpu.rotate(x, cos, sin, interleaved=interleaved, backward=False), plainly.detach(), want.detach())
    grad = torch.randn(shape_x).to(dtype)
    (grad_same,) = torch.autograd.grad(plainly, same[0], grad)
    (grad_exact,) = torch.autograd.grad(want, exact[0], grad.double())
    ours = gpu.rotate(grad, cos, sin, interleaved=interleaved, backward=True)
    assert_accurate(ours, grad_same, grad_exact, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_huge_and_tiny_values(size: float) -> None:
    test_rows((2, 3, 7, 16, 16), False, torch.float32, size)


@pytest.mark.parametrize("shape", [(2, 1, 5, 8), (1, 1, 5, 8), (2, 3, 5, 8), (1, 5, 8)])
def test_angles_are_read_where_they_lie(shape: tuple[int, ...]) -> None:
    x, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(shape), torch.randn(*shape[:-2], 8, 5).mT
    for backward, reference in ((False, rotary_reference), (True, rotary_backward_reference)):
        ours = gpu.rotate(x, cos, sin, interleaved=False, backward=backward)
        torch.testing.assert_close(ours, reference(x, cos, sin, interleaved=False))
