"""The norm ops against PyTorch's: values, gradients, the residual sum, tracing, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from autopar._torch import fake_mode
from autopar.kernels.normalisation import add_norm, norm, norm_backward
from tests.support.kernels.tracing import assert_traceable

EPS = 1e-5


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (0, 6)])
def test_equals_pytorch(shape: tuple[int, ...]) -> None:
    x, weight, bias = tensors(shape, (6,), (6,))
    torch.testing.assert_close(norm(x, weight, bias, eps=EPS, centred=True)[0], layer_norm(x, (6,), weight, bias, EPS))
    torch.testing.assert_close(norm(x, weight, None, eps=EPS, centred=False)[0], rms_norm(x, (6,), weight, EPS))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("affine", ["", "w", "b", "wb"])
def test_gradients(centred: bool, affine: str) -> None:
    x, residual, weight, bias = tensors((2, 3, 6), (2, 3, 6), (6,), (6,))
    weight, bias = (item if letter in affine else None for letter, item in (("w", weight), ("b", bias)))

    def alone(*inputs: Any) -> Any:
        return norm(*inputs, eps=EPS, centred=centred)[0]

    def both(*inputs: Any) -> Any:
        return add_norm(*inputs, eps=EPS, centred=centred)[:2]

    assert torch.autograd.gradcheck(alone, (x, weight, bias))
    assert torch.autograd.gradcheck(both, (x, residual, weight, bias))
    assert torch.autograd.gradcheck(lambda *inputs: both(*inputs)[0], (x, residual, weight, bias))
    assert torch.autograd.gradcheck(lambda *inputs: both(*inputs)[1], (x, residual, weight, bias))


def test_gradients_of_one_row() -> None:
    x, weight, bias = tensors((6,), (6,), (6,))
    assert torch.autograd.gradcheck(lambda *inputs: norm(*inputs, eps=EPS, centred=True)[0], (x, weight, bias))


@pytest.mark.parametrize("affine", ["", "w", "b", "wb"])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_sixteen_bits_only_the_results_are_rounded(dtype: torch.dtype, centred: bool, affine: str) -> None:
    """Statistics and the gradients of weight and bias are float32's, whatever is missing; rows and memory order are as they come."""
    x, residual, gradient = (item.detach().to(dtype).transpose(0, 1) for item in tensors((300, 3, 1000), (300, 3, 1000), (300, 3, 1000)))
    weight, bias = (
        item.detach().to(dtype) if letter in affine else None for letter, item in zip("wb", tensors((1000,), (1000,)), strict=True)
    )
    wide = [None if item is None else item.double() for item in (weight, bias)]
    options: dict[str, Any] = {"eps": EPS, "centred": centred}
    out, total, mean, reciprocal = add_norm(x, residual, weight, bias, **options)
    true = norm(total.double(), *wide, **options)
    assert_near((mean, reciprocal), true[1:], 1e-6)
    rounding = max(torch.finfo(dtype).eps, 1e-6)
    assert_near((out,), true[:1], rounding)
    for grad_total in (None, residual):
        sums = (gradient, grad_total, total)
        found = norm_backward(*sums, mean, reciprocal, weight, centred=centred, has_bias=bias is not None)
        doubles = [None if item is None else item.double() for item in (*sums, *true[1:], weight)]
        wanted = norm_backward(*doubles, centred=centred, has_bias=bias is not None)
        assert [tuple(item.shape) for item in found[1:]] == [(1000,) if letter in affine else (0,) for letter in "wb"]
        assert_near(found[:1], wanted[:1], rounding)
        assert_near(found[1:], wanted[1:], 1e-5)


def assert_near(found: tuple[Tensor, ...], true: tuple[Tensor, ...], tolerance: float) -> None:
    """Within `tolerance` of the largest element."""
    for one, other in zip(found, true, strict=True):
        if one.numel():
            assert (one.double() - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-3)


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    x, residual = (item.detach().bfloat16() for item in tensors((4, 64), (4, 64)))
    out, total, mean, _ = add_norm(x, residual, None, None, eps=EPS, centred=True)
    assert torch.equal(total, x + residual) and mean.dtype == torch.float32
    assert torch.equal(out, norm(x + residual, None, None, eps=EPS, centred=True)[0])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with fake_mode(), pytest.raises(ValueError, match=r"weight is \(5,\), and its rows have 6 columns"):
        norm(torch.empty(2, 6), torch.empty(5), None, eps=EPS, centred=True)
    with fake_mode(), pytest.raises(ValueError, match=r"a residual \(2, 1\) of torch.float32 cannot be added to \(2, 6\)"):
        add_norm(torch.empty(2, 6), torch.empty(2, 1), None, None, eps=EPS, centred=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_traces(transposed: bool) -> None:
    x, residual, weight, bias = tensors((4, 3, 6), (4, 3, 6), (6,), (6,), dtype=torch.float32)
    if transposed:
        x = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    options: dict[str, Any] = {"eps": EPS, "centred": True}
    assert_traceable(norm, (x, weight, bias), options, backward="autopar.norm_backward.default")
    assert_traceable(add_norm, (x, residual, weight, None), options, backward="autopar.norm_backward.default")
    rows = torch.rand(4, 3)
    arguments = (x.detach(), None, x.detach(), rows, rows, weight.detach())
    assert_traceable(norm_backward, arguments, {"centred": True, "has_bias": False})
