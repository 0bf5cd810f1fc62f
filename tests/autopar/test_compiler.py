"""The list of passes as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.driver.manager import text_of
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.schedule.hand_out import HandOut
from tests.support.captures import compiled

# What these write is not in the text: keys of nodes, the signature, a schedule's inputs and outputs.
SILENT = {FindAtoms, ChooseShardings, InsertReshards, HandOut}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


@pytest.mark.parametrize("axes", [{"dp": 1}, {"pp": 2, "dp": 2}], ids=str)
def test_a_pass_with_nothing_to_do_returns_what_it_got(axes: dict[str, int]) -> None:
    found = compiled(Mlp(), axes, {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}).compiled
    steps = [*found.steps, *found.schedule_steps]
    pairs = [(before, after) for before, after in zip(steps, steps[1:], strict=False) if text_of(before.program) == text_of(after.program)]
    again = {after.kind for before, after in pairs if before.program is not after.program}
    assert again <= SILENT
    idle = [after.name for before, after in pairs if before.program is after.program]
    assert {"detach outputs", "views of chunks"} <= set(idle) or "pp" in axes
    assert len(idle) > 20
