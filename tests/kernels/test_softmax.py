"""The softmax op against softmax written in PyTorch: values, gradients, empty rows, tracing, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar._torch import fake_mode
from autopar.kernels.softmax import softmax, softmax_backward
from tests.support.kernels.tracing import assert_traceable


def run(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    return softmax(x, mask, scale=scale, dtype=dtype or x.dtype)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4, 5), (0, 3), (3, 1)])
def test_equals_pytorch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(run(x, scale=0.7), (x * 0.7).softmax(-1))
    assert torch.autograd.gradcheck(lambda x: run(x, scale=0.7), (x,))


def test_rows_of_no_columns() -> None:
    assert run(torch.empty(3, 0)).shape == (3, 0)


def test_an_added_mask_comes_after_the_scale_and_has_a_gradient() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(3, 1, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(run(x, mask, 0.7), (x * 0.7 + mask).softmax(-1))
    assert torch.autograd.gradcheck(lambda x, mask: run(x, mask, 0.7), (x, mask))


def test_a_row_that_attends_to_nothing_is_zero_and_has_no_gradient() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    mask = torch.rand(4, 6) > 0.4
    mask[1], mask[:, 2] = False, True
    mask[1] = False
    out = run(x, mask)
    out.square().sum().backward()
    assert x.grad is not None and not out[1].any() and not x.grad[1].any()
    torch.testing.assert_close(out[0], x.masked_fill(~mask, -torch.inf).softmax(-1)[0])


def test_low_precision_is_computed_in_float32() -> None:
    torch.manual_seed(0)  # of other numbers one may lie between two of bfloat16, where the last bit in float32 decides
    x = torch.randn(4, 300).bfloat16() * 5
    assert torch.equal(run(x), x.float().softmax(-1).bfloat16())
    assert run(x, dtype=torch.float32).dtype == torch.float32


def test_a_mask_that_does_not_broadcast_is_refused() -> None:
    with fake_mode(), pytest.raises(ValueError, match=r"mask \(7, 2, 3\) does not broadcast to \(2, 3\)"):
        run(torch.randn(2, 3), torch.randn(7, 2, 3))


@pytest.mark.parametrize("with_mask", [False, True])
def test_traces(with_mask: bool) -> None:
    x = torch.randn(3, 4, 6, requires_grad=True)
    mask = torch.randn(4, 6, requires_grad=True) if with_mask else None
    options = {"scale": 0.5, "dtype": torch.float32}
    assert_traceable(softmax, (x, mask), options, backward="autopar.softmax_backward.default")
    assert_traceable(softmax_backward, (x.detach(), x.detach()), options)


def test_inputs_that_are_not_contiguous() -> None:
    x = torch.randn(6, 4, 3).permute(2, 0, 1)
    assert run(x).is_contiguous()
    assert_traceable(softmax, (x, None), {"scale": 0.5, "dtype": torch.float32})
