"""Process groups: modules share them, and they end with the default group."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ir.mesh import Mesh
from autopar.runtime.execute.group_cache import agree, distrust, known_or_made
from autopar.runtime.execute.process_groups import ProcessGroups
from tests.support.ranks import share
from tests.support.schedules import BATCH, WIDTH, Mlp


def num_groups_and_threads() -> tuple[int, int]:
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))


def compiles_often(axes: tuple[str, ...]) -> tuple[list[tuple[int, int]], list[float]]:
    """Groups and threads after each of four compiles and steps, and the losses; before the last one rank has lost its trust."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(BATCH, WIDTH, generator=generator) for name in "xy"}
    counts, losses = [], []
    for number in range(4):
        if number == 3 and dist.get_rank() == 1:
            distrust()
        torch.manual_seed(0)
        parallel = autopar.compile(Mlp(), device_mesh, example_inputs=share(batch, device_mesh), backend="eager", timeout=30)
        loss = parallel(**share(batch, device_mesh))["loss"]
        if loss.requires_grad:  # a stage may have no parameters
            loss.backward()
        counts.append(num_groups_and_threads())
        losses.append(float(loss.detach()))
    return counts, losses


@pytest.mark.parametrize("axes", [("dp", "tp"), ("pp", "tp")])
def test_compiling_again_takes_the_groups_that_are_there(axes: tuple[str, ...], gloo_ranks: Any) -> None:
    for counts, losses in gloo_ranks.run(compiles_often, axes):
        assert len(set(losses)) == 1
        assert counts[0][0] == counts[1][0] == counts[2][0] and counts[1][1] == counts[2][1]
        assert counts[3][0] > counts[2][0], "all make new ones where one rank's may be out of step"


def test_groups_end_with_the_default_group() -> None:
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
            groups = [ProcessGroups(device_mesh).along(Mesh((("dp", 1),)), ("dp",)).group for _ in range(2)]
            assert groups[0] is groups[1]
            dist.all_reduce(torch.ones(1), group=groups[0])
            assert ProcessGroups(device_mesh, timeout=60).along(Mesh((("dp", 1),)), ("dp",)).group is not groups[0]
            found.append(groups[0])
        finally:
            dist.destroy_process_group()
    assert found[0] is not found[1]
    distrust()  # there is nothing to doubt, and nothing happens


def test_what_is_doubted_is_made_anew() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first = known_or_made("a", list)
        agree(torch.device("cpu"))
        assert known_or_made("a", list) is first
        distrust()
        assert known_or_made("a", list) is first, "before the ranks agree"
        agree(torch.device("cpu"))
        again = known_or_made("a", list)
        assert again is not first
        agree(torch.device("cpu"))
        assert known_or_made("a", list) is again
    finally:
        dist.destroy_process_group()
