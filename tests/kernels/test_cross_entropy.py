"""The cross entropy op against PyTorch's: values, gradients, ignored rows, smoothing, tracing, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar._torch import fake_mode
from autopar.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from tests.kernels.tracing import assert_traceable

IGNORED = -100


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, shape[-1], shape[:-1])
    labels.view(-1)[::3] = IGNORED
    return torch.randn(shape, dtype=dtype).requires_grad_(), labels


def loss_of(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    return cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing)[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(4, 7), (2, 5, 7), (5, 1), (0, 3)])
def test_equals_pytorch(shape: tuple[int, ...], smoothing: float) -> None:
    logits, labels = inputs(*shape)
    expected = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(loss_of(logits, labels, smoothing), expected.reshape(labels.shape))
    assert torch.autograd.gradcheck(lambda logits: loss_of(logits, labels, smoothing), (logits,))


def test_an_ignored_row_has_no_gradient_even_where_it_is_not_finite() -> None:
    logits, labels = inputs(4, 7)
    logits = logits.detach().clone()
    logits[0] = float("nan")
    logits.requires_grad_()
    loss_of(logits, labels).sum().backward()
    assert labels[0] == IGNORED and logits.grad is not None and not logits.grad[0].any() and bool(logits.grad.isfinite().all())


def test_a_label_that_is_no_column_is_refused() -> None:
    logits, labels = inputs(4, 7)
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        loss_of(logits, labels.masked_fill(labels != IGNORED, 9))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with fake_mode(), pytest.raises(ValueError, match=r"got \(4, 7\) and \(3,\)"):
        loss_of(torch.empty(4, 7), torch.empty(3, dtype=torch.int64))


def test_traces() -> None:
    logits, labels = inputs(2, 5, 7, dtype=torch.float32)
    options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": 0.1}
    assert_traceable(cross_entropy, (logits, labels), options, backward="autopar.cross_entropy_backward.default")
    assert_traceable(cross_entropy_backward, (torch.rand(2, 5), logits.detach(), labels, torch.rand(2, 5)), options)
