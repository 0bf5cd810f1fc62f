"""Writes into an index or a view of a parameter on processes: they are in the parameter, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from tests.support.ranks import GlooRanks


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).square().mean()


def halve_rows(weight: Tensor) -> None:
    weight[1:3] *= 0.5


def set_one(weight: Tensor) -> None:
    weight[3, 2] = 5.0


# Of an embedding whose rows are split: those that are right, and those that torch would lose.
KEPT: dict[str, Callable[[Tensor], Any]] = {
    "a column": lambda weight: weight[:, 2].zero_(),
    "all rows": lambda weight: weight.div_(weight.norm(dim=1, keepdim=True)),
    "flat": lambda weight: weight.view(-1).mul_(2),
    "transposed": lambda weight: weight.t().mul_(2),
    "what was gathered, out of place": lambda weight: weight.mul_(weight[3].square().sum()),
    "a copy of what was gathered": lambda weight: weight.mul_(weight[3].clone().mul_(2).sum()),
}
LOST: dict[str, Callable[[Tensor], Any]] = {
    "the padding": lambda weight: weight.data[0].zero_(),
    "a draw": lambda weight: nn.init.normal_(weight[1]),
    "rows": halve_rows,
    "an element": set_one,
    "a piece": lambda weight: weight.split(3)[1].mul_(2),
    "of another shape": lambda weight: weight.view(4, 4, 8)[1].mul_(2),
}


def written(is_kept: bool, name: str, zero: int) -> tuple[float, str]:
    """How far the whole is from that of one device, and what was refused."""
    mesh, ids = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.arange(4).view(1, 4)
    torch.manual_seed(0)
    model = Embedded().double()
    plain, said = model.table.weight.detach().clone(), ""
    parallel = autopar.compile(model, mesh, example_inputs=(ids,), backend="eager", cluster="ideal", **({"zero": zero} if zero else {}))
    write = (KEPT if is_kept else LOST)[name]
    with torch.no_grad():
        try:
            write(parallel.get_parameter("table.weight"))
            torch.manual_seed(0)
            write(plain)
        except AutoparError as error:
            said = str(error)
    return float((parallel.full_state_dict()["table.weight"] - plain).abs().max()), said


@pytest.mark.parametrize("name", KEPT)
def test_writes_into_what_shows_the_parameter_are_kept(gloo_ranks: GlooRanks, name: str) -> None:
    for gap, said in gloo_ranks.run(written, True, name, 3):
        assert gap < 1e-12 and said == ""


@pytest.mark.parametrize("name", LOST)
def test_writes_that_torch_would_lose_are_refused(gloo_ranks: GlooRanks, name: str) -> None:
    for gap, said in gloo_ranks.run(written, False, name, 3):
        assert gap == 0 and "[16, 8]" in said.replace("[4, 4, 8]", "[16, 8]") and "would be lost" in said


def test_of_a_whole_parameter_all_writes_are_kept(gloo_ranks: GlooRanks) -> None:
    for gap, said in gloo_ranks.run(written, False, "rows", 0):
        assert gap < 1e-12 and said == ""
