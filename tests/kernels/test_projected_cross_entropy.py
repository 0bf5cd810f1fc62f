"""Cross entropy's sums of logits that are made in chunks, against the whole logits: values, gradients, parts, tracing, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar._torch import fake_mode
from autopar.kernels import projected_cross_entropy as module
from autopar.kernels.cross_entropy import cross_entropy
from autopar.kernels.projected_cross_entropy import projected_cross_entropy, projected_cross_entropy_backward
from tests.support.kernels.tracing import assert_traceable


def inputs(*rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((*rows, 4), (7, 4)))
    return hidden, weight, torch.randint(0, 7, rows), torch.arange(7)


@pytest.mark.parametrize("rows", [(5,), (2, 5), (0,)])
def test_equals_the_whole_logits(rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 21)
    hidden, weight, labels, classes = inputs(*rows)
    torch.testing.assert_close(projected_cross_entropy(hidden, weight, labels, classes), cross_entropy(hidden @ weight.mT, labels, classes))
    assert torch.autograd.gradcheck(lambda hidden, weight: projected_cross_entropy(hidden, weight, labels, classes), (hidden, weight))


def test_no_chunk_of_logits_is_larger_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 21)
    seen: list[int] = []

    def watched(logits: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(logits.numel())
        return cross_entropy(logits, labels, classes)

    monkeypatch.setattr(module, "cross_entropy", watched)
    projected_cross_entropy(*(item.detach() for item in inputs(10)))
    assert seen == [21, 21, 21, 7]


def test_the_weights_gradient_is_summed_more_precisely_than_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7)
    hidden, weight, labels, classes = (item.detach() for item in inputs(4096, dtype=torch.bfloat16))
    rows = torch.ones(4096)
    log_sum_exp = projected_cross_entropy(hidden, weight, labels, classes)[0]
    got = projected_cross_entropy_backward(rows, -rows, None, hidden, weight, labels, classes, log_sum_exp)[1]
    exact = [item.double() for item in (hidden, weight)]
    sums = projected_cross_entropy(*exact, labels, classes)[0]
    wanted = projected_cross_entropy_backward(rows.double(), -rows.double(), None, *exact, labels, classes, sums)[1]
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 0.02


def test_what_does_not_fit_is_refused() -> None:
    with fake_mode(), pytest.raises(ValueError, match=r"got \(4, 5\), \(7, 4\), \(4,\) and \(7,\)"):
        ids = torch.empty(4, dtype=torch.int64)
        projected_cross_entropy(torch.empty(4, 5), torch.empty(7, 4), ids, torch.empty(7, dtype=torch.int64))


def test_traces() -> None:
    hidden, weight, labels, classes = inputs(2, 5, dtype=torch.float32)
    assert_traceable(
        projected_cross_entropy, (hidden, weight, labels, classes), {}, backward="autopar.projected_cross_entropy_backward.default"
    )
    rows = torch.rand(2, 5)
    operands = (rows, rows, None, hidden.detach(), weight.detach(), labels, classes, rows)
    assert_traceable(projected_cross_entropy_backward, operands, {})
