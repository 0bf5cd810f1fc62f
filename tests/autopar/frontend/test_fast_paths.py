"""Modules for which torch has kernels of their own in evaluation are split as in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar


class Distilled(nn.Module):
    """A student beside a frozen teacher in evaluation, whose layers torch would run as one op."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = (nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.teacher.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return (self.student(x) - wanted).square().mean()


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_frozen_teacher_is_split(axes: dict[str, int]) -> None:
    given = {"x": torch.randn(8, 6, 32)}
    number, mesh = 2 if "pp" in axes else None, autopar.virtual_mesh(**axes)
    parallel = autopar.compile(Distilled(), mesh, example_inputs=given, num_microbatches=number, backend="eager")
    assert parallel.verify(**given) and "no rank repeats another's work" in parallel.explain()
    assert not [node for node in parallel.compiled.program.graph.nodes if "encoder_layer" in str(node.target)]
    assert torch.backends.mha.get_fastpath_enabled()
