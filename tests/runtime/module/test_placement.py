"""What is made to lie as a parameter does."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.module.placement import like


def devices() -> list[str]:
    """Of state that is kept away from its parameter, as a whole."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    parameter = DTensor.from_local(torch.zeros(2, 3, device="meta"), mesh, [Shard(0)], run_check=False)
    state = torch.ones(2, 3)
    of_its_shape, of_another_dtype = like(parameter, state), like(parameter, state.double())
    assert of_its_shape.to_local().data_ptr() == state.data_ptr() and of_its_shape.shape == (8, 3)
    return [each.to_local().device.type for each in (of_its_shape, of_another_dtype)]


def test_state_stays_where_it_is_kept(gloo_ranks: Any) -> None:
    assert gloo_ranks.run(devices) == [["cpu", "cpu"]] * 4
