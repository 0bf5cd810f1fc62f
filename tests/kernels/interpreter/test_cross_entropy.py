"""The cross entropy kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.kernels.gpu import cross_entropy as gpu
from tests.support.kernels.accuracy import GRADIENT_FACTOR, assert_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(2, 3, 7), (3, 130), (2, 1), (2, 5000), (0, 5)]


def pytorch(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return logits.logsumexp(-1), logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1), logits.sum(-1)


def check(logits: Tensor, labels: Tensor, read: tuple[int, ...] = (0, 1)) -> None:
    ours = gpu.forward(logits, labels, torch.tensor(logits.shape[-1]))
    # Ours are float32 whatever the logits: as good as PyTorch's in float32, from the logits as they are.
    for result in read:
        assert_accurate(ours[result], pytorch(logits.float(), labels)[result], pytorch(logits.double(), labels)[result])
    arriving = [torch.randn(labels.shape) if result in read else None for result in range(3)]
    gradient = gpu.backward(*arriving, logits, labels, ours[0])
    gradients: list[Tensor] = []
    for dtype in (logits.dtype, torch.float64):
        leaf = logits.to(dtype).detach().requires_grad_()
        results = pytorch(leaf, labels)
        torch.autograd.backward([results[each] for each in read], [arriving[each].to(dtype) for each in read])  # type: ignore[union-attr]
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert_accurate(gradient, *gradients, factor=GRADIENT_FACTOR)


def labels_for(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, shape[-1], shape[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read", [(0, 1), (0,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, ...], read: tuple[int, ...], dtype: torch.dtype) -> None:
    check((torch.randn(shape) * 4).to(dtype), labels_for(shape), read)


@pytest.mark.parametrize("size", [1e4, 1e-6])
def test_huge_and_tiny_values(size: float) -> None:
    check(torch.randn(3, 130) * size, labels_for((3, 130)))


def test_masked_out_columns() -> None:
    logits = torch.randn(3, 5000).index_fill(1, torch.arange(2000), -torch.inf)
    check(logits, torch.tensor([2500, 2000, 4999]))


def test_labels_that_are_not_here_and_columns_that_are_padding() -> None:
    logits, index = torch.randn(4, 100), torch.tensor([-1, 89, 0, -1])
    ours = gpu.forward(logits.index_fill(1, torch.arange(90, 100), torch.nan), index, torch.tensor(90))
    torch.testing.assert_close(ours[0], logits[:, :90].logsumexp(-1))
    torch.testing.assert_close(ours[1], torch.stack([torch.zeros(()), logits[1, 89], logits[2, 0], torch.zeros(())]))
    torch.testing.assert_close(ours[2], logits[:, :90].sum(-1))
    gradient = gpu.backward(None, torch.ones(4), None, logits, index, ours[0])
    assert gradient.nonzero().tolist() == [[1, 89], [2, 0]]


def test_nothing_but_masked_columns() -> None:
    logits = torch.full((2, 70), -torch.inf)
    assert gpu.forward(logits, torch.tensor([0, 1]), torch.tensor(70))[0].tolist() == [-torch.inf] * 2


def test_a_row_without_gradient_has_none_even_where_it_is_not_finite() -> None:
    logits = torch.randn(2, 130)
    logits[0] = torch.nan
    labels, arriving = torch.tensor([1, 2]), torch.tensor([0.0, 1.0])
    gradient = gpu.backward(arriving, -arriving, None, logits, labels, gpu.forward(logits, labels, torch.tensor(130))[0])
    assert not gradient[0].any() and bool(gradient.isfinite().all())


def test_inputs_that_are_not_contiguous() -> None:
    check(torch.randn(130, 3).T, torch.randint(0, 130, (3, 2))[:, 0])
