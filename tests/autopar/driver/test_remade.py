"""Programs that nobody holds are made again as they were."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.driver.compiled import PassRun
from autopar.driver.manager import History, text_of
from autopar.driver.remade import Remade
from autopar.ir.program import Form


class Model(nn.Module):
    """Draws, a norm, a vocabulary that is padded, two equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(15, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(8, 15)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.symbols(tokens)
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.1, self.training)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, torch.Tensor]:
    return dict.fromkeys(("tokens", "labels"), torch.arange(32).view(8, 4) % 15)


@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2, "tp": 2}, {"precision": "bf16"}), ({"pp": 2, "tp": 2}, {"num_microbatches": 2})],
    ids=["dp tp", "pp tp"],
)
def test_what_is_not_held_is_made_again(axes: dict[str, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    texts, honest = list[str](), History.__call__

    def noting(self: History, step: PassRun) -> None:
        texts.append(text_of(step.program))
        honest(self, step)

    monkeypatch.setattr(History, "__call__", noting)
    parallel = autopar.compile(Model(), autopar.virtual_mesh(**axes), example_inputs=batch(), backend="eager", **options)
    steps = parallel.compiled.steps
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # whatever the user does by then
        assert [text_of(step.program) for step in steps] == texts[: len(steps)]
    remade = [step for step in steps if isinstance(step.held, Remade)]
    assert len(remade) > 10 and all(step.form is step.program.form is not Form.FORWARD for step in remade)


def test_what_somebody_looks_at_is_one_program() -> None:
    parallel = autopar.compile(Model(), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
    step = next(step for step in parallel.compiled.steps if isinstance(step.held, Remade))
    alike = [each.program for each in parallel.compiled.steps if each.held is step.held]
    assert all(each is alike[0] for each in alike) and step.program is alike[0]
    graph = alike[0].graph
    del alike
    gc.collect()
    assert step.program.graph is not graph
