"""What fails in the middle of a step is said with the line of the model that it was computing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8), nn.Embedding(6, 8)

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        words = self.words(ids)
        places = self.places(at)
        return torch.tanh(words * places).square().mean()


IDS, AT = torch.arange(8).view(4, 2), torch.arange(6).repeat(2)[:8].view(4, 2)


def notes_of(backend: str, ids: Tensor, at: Tensor) -> list[str]:
    parallel = autopar.compile(TwoTables(), autopar.virtual_mesh(dp=2), example_inputs=(IDS, AT), backend=backend)
    assert parallel(IDS, AT).item() > 0
    with pytest.raises((IndexError, RuntimeError), match="index out of") as error:
        parallel(ids, at)
    return error.value.__notes__


def test_an_id_outside_of_its_table_is_told_with_the_line_that_looks_it_up() -> None:
    line, rank = notes_of("eager", IDS + 3, AT)
    assert line.startswith("computing embedding_default of words, where: ") and line.endswith("words = self.words(ids)")
    assert "test_failing_lines.py:" in line and rank.startswith("on rank 1, instruction ")
    line, rank = notes_of("eager", IDS, AT + 1)
    assert "of places, where: " in line and line.endswith("places = self.places(at)") and rank.startswith("on rank 1, ")


def test_compiled_code_is_told_with_the_lines_that_may_be_meant() -> None:
    lines, rank = notes_of("inductor", IDS, AT + 1)
    first, *computed = lines.splitlines()
    assert first.startswith("in fragment f0, which computes:") and rank.startswith("on rank 1, ")
    assert [each.split("  ")[-1] for each in computed] == ["words = self.words(ids)", "places = self.places(at)"]
