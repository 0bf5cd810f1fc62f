"""Ops that torch traces with other strides than their kernels give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.verify import reference_run


class LinearAttention(nn.Module):
    """Sums along positions, of heads that lie behind them; the backward of elu is viewed as it was traced."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = F.elu(self.query(x).view(*x.shape[:2], 2, 8).transpose(1, 2))
        return heads.cumsum(2).square().mean()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_view_that_torch_traced_in_vain_is_a_copy(backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 16)
    parallel = autopar.compile(LinearAttention(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend=backend)
    parallel(x).backward()
    assert parallel.verify(x, promote=True)


def test_what_cannot_run_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_run, "_viewed", torch.Tensor.view)
    x = torch.randn(4, 6, 16)
    parallel = autopar.compile(LinearAttention(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    report = parallel.verify(x, promote=True)
    assert not report
    assert "view size is not compatible" in str(report) and "trace joint and the passes after it" in str(report)
