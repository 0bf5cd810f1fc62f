"""Batch norms that are told to add up over ranks are those of the global batch, as all are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import CaptureError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 4)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def trained(model: Any, batches: list[Tensor]) -> list[float]:
    losses: list[float] = []
    optimizer = None
    for x in batches:
        loss = model(x)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_ranks(cache: Path) -> None:
    torch.manual_seed(0)
    plain, batches = Model(), [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Model())
    parallel = autopar.compile(model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), backend="eager", cache=cache)
    shares = [x.chunk(4)[dist.get_rank()] for x in batches]
    torch.testing.assert_close(trained(parallel, shares), trained(plain, batches))
    torch.testing.assert_close(parallel.full_state_dict(), plain.state_dict())
    assert parallel.verify(shares[0]) and nn.SyncBatchNorm.forward is not nn.BatchNorm1d.forward


def test_they_are_those_of_the_global_batch(gloo_ranks: Any, tmp_path: Path) -> None:
    gloo_ranks.run(on_ranks, tmp_path)


def over_two() -> None:
    group = dist.new_group([0, 1])
    norms = nn.Sequential(nn.SyncBatchNorm(6, process_group=group if dist.get_rank() < 2 else None))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    parallel = autopar.compile(norms, mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"'0' is a SyncBatchNorm over 2 of 4 ranks, .* leave process_group out"):
        parallel(torch.randn(2, 6))


def test_those_over_some_ranks_are_refused(gloo_ranks: Any) -> None:
    gloo_ranks.run(over_two)
