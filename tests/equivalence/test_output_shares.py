"""What a call on processes returns besides the loss is the rank's share along dp, also behind ops that go across samples; what has no
dim of samples is whole, of whatever size it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

SAMPLES = 8
ACROSS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda h: h.flip(0),
    "cumsum": lambda h: h.cumsum(0),
    "softmax": lambda h: h.softmax(0),
    "solve": lambda h: torch.linalg.solve(h @ h.T + torch.eye(len(h), dtype=h.dtype), h),
    "permuted": lambda h: h[torch.arange(len(h) - 1, -1, -1)],
}


class Model(nn.Module):
    """Of 8 samples and 8 features, so that sizes tell nothing."""

    def __init__(self, across: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.across = nn.Linear(8, 8), nn.Linear(8, 8), across

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.across(self.first(x))
        return self.last(h), h.mean(0)


def differences(name: str, samples: int) -> dict[str, Any]:
    """Of this rank's outputs, and of gradients of the mean over dp of the ranks' own losses, from those of the model itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = dist.get_rank() // 2
    torch.manual_seed(1)
    x, model, plain = torch.randn(samples, 8, dtype=torch.float64), Model(ACROSS[name]).double(), Model(ACROSS[name]).double()
    parallel = autopar.compile(model, mesh, backend="eager", timeout=180)
    mine = x.tensor_split(2)[place]
    with torch.no_grad():
        each, mean = parallel(mine)
    wanted, wanted_mean = plain(x)
    found = {"output": _apart(each, wanted.tensor_split(2)[place]), "mean": _apart(mean, wanted_mean)}
    if samples % 2 == 0:
        parallel(mine)[0].square().mean().backward()
        wanted.square().mean().backward()
        pairs = zip(parallel.parameters(), plain.parameters(), strict=True)
        found["gradient"] = max(_apart(_whole(ours.grad), theirs.grad) for ours, theirs in pairs)
    return found


def _whole(gradient: Tensor | None) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


def _apart(ours: Tensor, theirs: Tensor | None) -> float:
    assert theirs is not None and ours.shape == theirs.shape, (ours.shape, theirs is not None and theirs.shape)
    return float((ours - theirs).abs().max().detach())


@pytest.mark.parametrize("name", ACROSS)
def test_outputs_behind_ops_across_samples(gloo_ranks: Any, name: str) -> None:
    for found in gloo_ranks.run(differences, name, SAMPLES):
        assert max(found.values()) < 1e-9 and len(found) == 3, found


def test_unequal_shares(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(differences, "flip", 7):
        assert max(found.values()) < 1e-9, found
