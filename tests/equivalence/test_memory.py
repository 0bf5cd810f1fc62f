"""The bytes that are predicted for parameters, gradients and optimizer state are those that real ranks allocate, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.execute.world import local_of
from tests.support.models.zoo import ZOO

# ---- on the ranks


def measured(name: str, budget: float | None) -> dict[str, Any]:
    """What this rank holds after a step of AdamW, and what the summary said of it."""
    torch.manual_seed(0)
    case = ZOO[name](1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = {key: value.chunk(2)[dist.get_rank() // 2] for key, value in case.batch.items()}
    whole = sum(parameter.nbytes for parameter in case.model.parameters())
    capacity = None if budget is None else budget * whole
    parallel = autopar.compile(
        case.model, mesh, example_inputs=batch, backend="eager", cluster="8xH100", memory_budget=capacity, optimizer="adamw", timeout=180
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, foreach=True)
    parallel(**batch).loss.backward()
    optimizer.step()
    parameters = list(parallel.parameters())
    state = [value for states in optimizer.state.values() for value in states.values() if isinstance(value, Tensor)]
    held = {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(local_of(parameter.grad).nbytes for parameter in parameters if parameter.grad is not None),
        "optimizer_state": sum(map(_bytes, state)),
    }
    predicted = parallel.summary()["memory"]
    return {"held": held, "predicted": {part: predicted[part] for part in held}, "whole": whole}


def _bytes(value: Tensor) -> int:
    """Of the storage: a part that kept the whole alive would count as the whole."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.untyped_storage().nbytes()


# ---- the tests


@pytest.mark.parametrize(("name", "budget"), [("gpt2", None), pytest.param("llama", 4.6, marks=pytest.mark.slow)])
def test_predicted_bytes_are_what_is_allocated(gloo_ranks: Any, name: str, budget: float | None) -> None:
    """With a budget parameters are split over dp as well; without one none of this small model is split at all."""
    found = gloo_ranks.run(measured, name, budget)
    for rank in found:
        assert rank["held"] == rank["predicted"]
    if budget is not None:
        assert max(rank["held"]["parameters"] for rank in found) < 0.75 * found[0]["whole"]
