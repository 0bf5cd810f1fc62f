"""The norm ops against PyTorch's: values, gradients, the residual sum, tracing, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from autopar._torch import fake_mode
from autopar.kernels.normalisation import add_norm, norm, norm_backward
from tests.kernels.tracing import assert_traceable

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
