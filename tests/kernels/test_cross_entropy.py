"""The sums that cross entropy is made of, against plain ops: values, gradients, parts of the classes, tracing, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar._torch import fake_mode
from autopar.kernels import cross_entropy as module
from autopar.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from tests.support.kernels.tracing import assert_traceable


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype).requires_grad_(), torch.randint(0, shape[-1], shape[:-1]), torch.arange(shape[-1])


@pytest.mark.parametrize("shape", [(4, 7), (2, 5, 7), (5, 1), (0, 3), (6,)])
def test_equals_plain_ops(shape: tuple[int, ...]) -> None:
    logits, labels, classes = inputs(*shape)
    expected = (logits.logsumexp(-1), logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1), logits.sum(-1))
    torch.testing.assert_close(cross_entropy(logits, labels, classes), expected)
    assert torch.autograd.gradcheck(lambda logits: cross_entropy(logits, labels, classes), (logits,))


@pytest.mark.parametrize("result", range(3))
def test_gradient_of_one_result(result: int) -> None:
    logits, labels, classes = inputs(4, 7)
    assert torch.autograd.gradcheck(lambda logits: cross_entropy(logits, labels, classes)[result], (logits,))


def test_parts_of_the_classes_make_the_whole() -> None:
    logits, labels, classes = inputs(5, 12)
    whole = cross_entropy(logits, labels, classes)
    parts = [cross_entropy(logits[:, start : start + 4], labels, classes[start : start + 4]) for start in (0, 4, 8)]
    log_sum_exp, picked, total = (torch.stack(each) for each in zip(*parts, strict=True))
    torch.testing.assert_close((log_sum_exp.logsumexp(0), picked.sum(0), total.sum(0)), whole)
    arriving = (torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64), None)
    gradients = [
        cross_entropy_backward(*arriving, logits[:, start : start + 4], labels, classes[start : start + 4], whole[0]) for start in (0, 4, 8)
    ]
    torch.testing.assert_close(torch.cat(gradients, 1), cross_entropy_backward(*arriving, logits, labels, classes, whole[0]))


def test_columns_without_a_class_are_padding() -> None:
    logits, labels, classes = inputs(5, 12)
    padded = torch.cat((logits.detach(), torch.full((5, 3), torch.nan, dtype=torch.float64)), 1)
    numbers = torch.cat((classes, torch.full((3,), torch.iinfo(torch.int64).min)))
    torch.testing.assert_close(cross_entropy(padded, labels, numbers), cross_entropy(logits, labels, classes))
    nothing = cross_entropy(padded[:, 12:], labels, numbers[12:])
    assert [set(item.tolist()) for item in nothing] == [{-torch.inf}, {0.0}, {0.0}]


def test_classes_with_gaps() -> None:
    logits, _, _ = inputs(4, 6)
    labels, classes = torch.tensor([11, 2, 3, 10]), torch.tensor([0, 1, 2, 10, 11, 12])
    assert cross_entropy(logits, labels, classes)[1].tolist() == [logits[0, 4], logits[1, 2], 0.0, logits[3, 3]]


def test_a_row_without_gradient_has_none_even_where_it_is_not_finite() -> None:
    logits, labels, classes = inputs(4, 7)
    logits = logits.detach().clone()
    logits[0] = float("nan")
    logits.requires_grad_()
    log_sum_exp, picked, _ = cross_entropy(logits, labels, classes)
    torch.where(torch.arange(4) > 0, log_sum_exp - picked, 0.0).sum().backward()
    assert logits.grad is not None and not logits.grad[0].any() and bool(logits.grad.isfinite().all())


def test_a_label_that_is_no_class_picks_nothing() -> None:
    logits, labels, classes = inputs(4, 7)
    assert not cross_entropy(logits, torch.tensor([7, -1, -100, 2**40]), classes)[1].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with fake_mode(), pytest.raises(ValueError, match=r"got \(4, 7\), \(3,\) and \(7,\)"):
        cross_entropy(torch.empty(4, 7), torch.empty(3, dtype=torch.int64), torch.empty(7, dtype=torch.int64))


def test_traces() -> None:
    logits, labels, classes = inputs(2, 5, 7, dtype=torch.float32)
    assert_traceable(cross_entropy, (logits, labels, classes), {}, backward="autopar.cross_entropy_backward.default")
    rows = torch.rand(2, 5)
    assert_traceable(cross_entropy_backward, (rows, rows, None, logits.detach(), labels, classes, rows), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_by_block_it_is_the_reference_bit_by_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 20)  # two rows, three with a rest
    logits, labels, _ = inputs(3, 3, 10, dtype=dtype)
    logits = logits.detach().transpose(0, 1)
    classes = torch.tensor([0, 1, 2, 3, 5, 6, 7, 9, -1, -1])  # gaps, and padding at the end
    whole, parts = (f(logits, labels, classes) for f in (module.cross_entropy_reference, module.cross_entropy_in_blocks))
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    arriving = [torch.randn(3, 3) for _ in range(3)]
    arriving[0][1] = 0  # rows without a gradient
    for number in range(4):
        given = [None if place == number else each for place, each in enumerate(arriving)]
        more = (*given, logits, labels, classes, whole[0])
        assert torch.equal(module.cross_entropy_backward_reference(*more), module.cross_entropy_backward_in_blocks(*more))
