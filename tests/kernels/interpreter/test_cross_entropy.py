"""The cross entropy kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.kernels.gpu import cross_entropy as gpu
from tests.kernels.accuracy import GRADIENT_FACTOR, assert_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IGNORED = -100
SHAPES = [(2, 3, 7), (3, 130), (2, 1), (2, 5000), (0, 5)]


def pytorch(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    flat = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=smoothing)
    return flat.reshape(labels.shape)


def check(logits: Tensor, labels: Tensor, smoothing: float) -> None:
    options = {"ignore_index": IGNORED, "label_smoothing": smoothing}
    loss, log_sum_exp = gpu.forward(logits, labels, **options)
    # Ours is float32 whatever the logits: as good as PyTorch's in float32, from the logits as they are.
    assert_accurate(loss, pytorch(logits.float(), labels, smoothing), pytorch(logits.double(), labels, smoothing))
    grad_loss = torch.randn(labels.shape)
    ours = gpu.backward(grad_loss, logits, labels, log_sum_exp, **options)
    gradients: list[Tensor] = []
    for dtype in (logits.dtype, torch.float64):
        leaf = logits.to(dtype).detach().requires_grad_()
        pytorch(leaf, labels, smoothing).backward(grad_loss.to(dtype))
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert_accurate(ours, *gradients, factor=GRADIENT_FACTOR)


def labels_for(shape: tuple[int, ...]) -> Tensor:
    labels = torch.randint(0, shape[-1], shape[:-1])
    labels.view(-1)[1::3] = IGNORED
    return labels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, ...], smoothing: float, dtype: torch.dtype) -> None:
    check((torch.randn(shape) * 4).to(dtype), labels_for(shape), smoothing)


@pytest.mark.parametrize("size", [1e4, 1e-6])
def test_huge_and_tiny_values(size: float) -> None:
    check(torch.randn(3, 130) * size, labels_for((3, 130)), 0.0)


def test_masked_out_columns() -> None:
    logits = torch.randn(3, 5000).index_fill(1, torch.arange(2000), -torch.inf)
    check(logits, torch.tensor([2500, IGNORED, 4999]), 0.0)


def test_a_label_that_is_no_column_gives_nan() -> None:
    loss, _ = gpu.forward(torch.randn(2, 7), torch.tensor([7, -1]), ignore_index=IGNORED, label_smoothing=0.0)
    assert bool(loss.isnan().all())


def test_inputs_that_are_not_contiguous() -> None:
    check(torch.randn(130, 3).T, torch.randint(0, 130, (3, 2))[:, 0], 0.0)
