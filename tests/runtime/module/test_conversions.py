"""`.to`, `.float` and their like of a parallel module on processes, where parameters are DTensors that programs were made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError


def converted() -> str:
    """What the refusals say. Conversions that change nothing leave the parameters, and the module runs as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    parallel = autopar.compile(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), backend="eager")
    assert parallel.double() is parallel.float() is parallel.to("cpu") is parallel  # nothing is placed yet
    x = torch.randn(4, 8)
    before, parameters = parallel(x), [*parallel.parameters()]
    for convert in (
        parallel.float,
        parallel.cpu,
        lambda: parallel.to("cpu", torch.float32),
        lambda: parallel.to(memory_format=torch.channels_last),
    ):
        assert convert() is parallel
    assert all(each is known for each, known in zip(parallel.parameters(), parameters, strict=True))
    assert torch.equal(parallel(x), before)
    found = []
    for convert in (parallel.double, parallel.bfloat16, lambda: parallel.to("meta")):
        with pytest.raises(AutoparError) as error:
            convert()
        found.append(str(error.value))
    assert torch.equal(parallel(x), before)
    return "\n".join(found)


def test_conversions_that_change_nothing_are_taken_and_others_refused(gloo_ranks: Any) -> None:
    for text in gloo_ranks.run(converted):
        assert "'0.weight' is torch.float32 on processes, where it is placed, and cannot become torch.float64 there" in text
        assert "cannot become torch.bfloat16" in text and "is cpu on processes, where it is placed, and cannot become meta" in text
        assert "convert the model before autopar.compile, or ask autopar.compile for another precision with precision=" in text
        assert text.endswith("move the model before autopar.compile, and compile it for a mesh of such devices")


class Squares(nn.Module):
    """A second half without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y @ y.mT @ y).square().mean()


def converted_on_stages() -> tuple[bool, str]:
    """Whether this rank holds no parameter, and what the refusal says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    parallel = autopar.compile(Squares(), mesh, backend="eager")
    parallel(torch.randn(4, 8, 16))
    assert parallel.to("cpu") is parallel.float() is parallel
    with pytest.raises(AutoparError) as error:
        parallel.double()
    return not list(parallel.parameters()), str(error.value)


def test_a_stage_without_parameters_says_what_the_others_say(gloo_ranks: Any) -> None:
    held, texts = zip(*gloo_ranks.run(converted_on_stages), strict=True)
    assert set(held) == {True, False}
    assert len(set(texts)) == 1 and "cannot become torch.float64" in texts[0]
