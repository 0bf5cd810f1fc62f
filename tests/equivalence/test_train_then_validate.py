"""Training and calls without gradients in turn: the graph of a backward tells other pieces of a parameter apart than a forward does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.captures import compiled
from tests.support.ranks import GlooRanks


class Skip(nn.Module):
    """The backward of `cat` cuts 48 columns as (3, 16); the forward knows of no such thing."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.both, self.last = nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(48, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        narrow = self.narrow(x).relu()
        wide = self.wide(narrow).relu()
        return (self.last(self.both(torch.cat((wide, narrow), -1)).relu()) - y).square().mean()


class ByMode(nn.Module):
    """Looks at 48 columns in one way in training, and in one that contradicts it in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = self.first(x).unflatten(-1, (12, 4) if self.training else (3, 16)).softmax(-1)
        return (self.last(parts.flatten(-2)) - y).square().mean()


def made(model: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return model().double(), (torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64))


def results(model: nn.Module, batch: tuple[Tensor, ...], is_training: bool) -> Tensor:
    """The loss; in training gradients are left behind."""
    model.train(is_training)
    with torch.set_grad_enabled(is_training):
        loss = model(*batch)
    model.zero_grad()
    if is_training:
        loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({"tp": 4}, {}),
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 2, "num_microbatches": 2}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"pp": 2, "tp": 2}, {"num_microbatches": 2}),
]


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["train first", "validate first"])
@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
@pytest.mark.parametrize("model", [Skip, ByMode])
def test_losses_and_gradients_are_the_originals(
    model: type[nn.Module], mesh: dict[str, int], options: dict[str, Any], order: tuple[bool, bool]
) -> None:
    original, batch = made(model)
    parallel = compiled(made(model)[0], mesh, **options)
    for is_training in order * 2:
        assert torch.allclose(results(parallel, batch, is_training), results(original, batch, is_training), atol=1e-14)
        wanted, found = gradients(original), gradients(parallel)
        assert wanted.keys() == found.keys() and all(torch.allclose(found[name], wanted[name], atol=1e-14) for name in wanted)


def on_processes(validates_first: bool) -> tuple[list[float], float]:
    """Of each call the difference of the losses, and that of what two steps of SGD make of the parameters."""
    original, batch = made(Skip)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = tuple(each.chunk(2)[mesh.get_local_rank("dp")] for each in batch)
    parallel, gaps = compiled(made(Skip)[0], mesh, timeout=180), list[float]()
    for number in range(4):
        is_training = number % 2 == validates_first
        losses = results(parallel, mine, is_training), results(original, batch, is_training)
        gaps.append(float((losses[0] - losses[1]).abs()))
        for module in (parallel, original) if is_training else ():
            torch.optim.SGD(module.parameters(), lr=0.1).step()
    full = parallel.full_state_dict()
    return gaps, max(float((full[name] - each).abs().max()) for name, each in original.state_dict().items() if name in full)


@pytest.mark.parametrize("validates_first", [False, True])
def test_steps_on_processes(gloo_ranks: GlooRanks, validates_first: bool) -> None:
    for gaps, error in gloo_ranks.run(on_processes, validates_first):
        assert max(gaps) < 1e-12 and error < 1e-12
