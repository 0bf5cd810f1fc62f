"""`p.data = x` on processes: the part that a rank has is another then, as a tensor of one device is; what cannot be so is refused."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from autopar import ParallelModule
from autopar.errors import AutoparError
from tests.support.captures import compiled
from tests.support.ranks import GlooRanks, share


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def trained(module: nn.Module, x: Tensor) -> list[float]:
    """As loops of moving averages, and of sharpness-aware minimisation, do it: other data, the old ones again, a mean of both."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=0.1), list[float]()
    for _ in range(3):
        before = [parameter.data for parameter in module.parameters()]
        for parameter in module.parameters():
            parameter.data = 0.5 * parameter.data
        loss = module(x)
        losses.append(loss.item())
        loss.backward()
        for parameter, old in zip(module.parameters(), before, strict=True):
            parameter.data = old
        optimizer.step()
        optimizer.zero_grad()
        losses.append(module(x).item())
        for parameter, old in zip(module.parameters(), before, strict=True):
            parameter.data = 0.9 * parameter.data + 0.1 * old
        losses.append(module(x).item())
    return losses


def on_a_process(axes: dict[str, int], options: dict[str, Any]) -> tuple[list[float], list[float], str]:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(8, 8, dtype=torch.float64)
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parallel: ParallelModule = compiled(model, mesh, (share({"x": x}, mesh)["x"],), timeout=180, **options)
    found = trained(parallel, share({"x": x}, mesh)["x"])
    parameter: Any = parallel.layers[0].weight
    parameter.data = distribute_tensor(torch.zeros(16, 8, dtype=torch.float64), parameter.device_mesh, parameter.placements)
    assert not parameter.full_tensor().any()
    try:
        parameter.data = torch.zeros(16, 8, dtype=torch.float64)
    except AutoparError as error:
        return found, trained(reference, x), str(error)
    return found, trained(reference, x), ""


def test_parameters_take_other_data_as_on_one_device(gloo_ranks: GlooRanks) -> None:
    for axes, options in (({"dp": 2, "tp": 2}, {}), ({"dp": 4}, {"zero": 3})):
        for found, wanted, refused in gloo_ranks.run(on_a_process, axes, options):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
            assert "is given other data (p.data = x): a plain f64[16, 8]" in refused and "p.copy_(x)" in refused
