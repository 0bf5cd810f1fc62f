"""Torch's anomaly mode on processes, where gradients are DTensors, in which torch cannot look for NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar


def gradient_of(parameter: Tensor) -> Tensor:
    """Whole."""
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    reference = [each.detach().clone().requires_grad_() for each in model.parameters()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = autopar.compile(
        model, mesh, pins={"0.weight": ("tp", None), "2.weight": (None, "tp")}, backend="eager", cluster=autopar.Cluster.ideal()
    )
    x = torch.randn(8, 8)
    share = x.chunk(2)[mesh.get_local_rank("dp")]
    weight, bias, weight_2, bias_2 = reference
    (torch.tanh(x @ weight.T + bias) @ weight_2.T + bias_2).square().mean().backward()
    found: dict[str, Any] = {}

    def difference(times: int) -> float:
        pairs = zip(parallel.parameters(), reference, strict=True)
        return max(float((gradient_of(each) - times * gradient_of(wanted)).abs().max()) for each, wanted in pairs)

    with torch.autograd.detect_anomaly(check_nan=True):
        parallel(share).square().mean().backward()
        found["once"] = difference(1)
        parallel(share).square().mean().backward()
        found["twice"] = difference(2)
        found["kinds"] = {type(each.grad) for each in parallel.parameters()}
        try:
            parallel(torch.where(share == share.max(), torch.inf, share)).square().mean().backward()  # tanh'(inf) * inf
        except RuntimeError as error:
            found["nan"] = str(error)
        first, *others = parallel.parameters()
        parallel.zero_grad()
        parallel(share).square().mean().backward(inputs=[first])
        found["left out"] = first.grad is not None and all(each.grad is None for each in others)
        handle = first.register_hook(lambda _: None)
        try:
            parallel(share).square().mean().backward()
        except autopar.AutoparError as error:
            found["hook"] = str(error)
        handle.remove()
    parallel.zero_grad()
    with torch.autograd.detect_anomaly(check_nan=False):
        parallel(share).square().mean().backward()
        found["without looking"] = difference(1)
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_gradients_are_looked_at_and_come_as_ever(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(trained):
        assert max(found["once"], found["twice"], found["without looking"]) < 1e-6, found
        assert found["kinds"] == {DTensor} and found["left out"]
        assert "the gradient of '0.weight' has nan values" in found["nan"]
        assert "handed to a hook" in found["hook"] and "set_detect_anomaly(True, check_nan=False)" in found["hook"]
