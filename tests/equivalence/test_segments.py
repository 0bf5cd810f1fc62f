"""`torch.segment_reduce`, whose lengths count along the rows: no part of these is a rank's own, while features are."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import autopar


class Pooled(nn.Module):
    def __init__(self, reduce: str, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.reduce = nn.Linear(3, width), reduce

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.inner(x)
        return torch.segment_reduce(h if h.shape[-1] > 1 else h.squeeze(-1), self.reduce, lengths=lengths, axis=0).square().sum()


@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("reduce", ["max", "min", "sum", "mean", "prod"])
def test_rows_are_whole_and_features_split(reduce: str, width: int, axes: Mapping[str, int]) -> None:
    model = Pooled(reduce, width).double()
    given = {"x": torch.randn(8, 3, dtype=torch.float64), "lengths": torch.tensor([3, 5])}
    plain = copy.deepcopy(model)
    plain(**given).backward()
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=given, backend="eager")
    parallel(**given).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert parallel.verify(**given)
    if "tp" in axes and width > 1:
        (call,) = (node for node in parallel.compiled.program.graph.nodes if "segment_reduce.default" in str(node.target))
        assert "tp" in str(autopar.ir.keys.SHARDING[call])


class Batched(nn.Module):
    """Segments of each sample by themselves, along its rows."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.axis = nn.Linear(3, 1), axis

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.segment_reduce(self.inner(x).squeeze(-1), "max", lengths=lengths, axis=self.axis).square().sum()


@pytest.mark.parametrize("axis", [1, -1])
def test_samples_with_segments_of_their_own(axis: int) -> None:
    given = {"x": torch.randn(8, 5, 3, dtype=torch.float64), "lengths": torch.tensor([[2, 3], [4, 1]] * 4)}
    parallel = autopar.compile(Batched(axis).double(), autopar.virtual_mesh(dp=2, tp=2), example_inputs=given, backend="eager")
    assert parallel.verify(**given)
