"""How ranks speak where their tensors are on devices."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.runtime.execute.host_group import host_group
from autopar.runtime.execute.process_groups import ProcessGroups

DEVICE = torch.device("meta")  # in place of a GPU: nothing could be read there


@pytest.fixture
def world() -> Generator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def of_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dist.get_backend_config
    monkeypatch.setattr(dist, "get_backend_config", lambda group: asked(group).replace("cpu:gloo,", ""))


def test_by_the_group_itself_where_it_takes_tensors_of_the_host(world: dist.ProcessGroup) -> None:
    assert host_group(world, [0], DEVICE, None) == (world, torch.device("cpu"))


def test_a_world_of_nccl_alone_gets_a_group_of_gloo(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nccl_alone(monkeypatch)
    made: list[dict[str, Any]] = []
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: made.append(options) or new_group(*args, **options))
    groups = ProcessGroups(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), timeout=30)
    assert groups.is_equal(3, "a number") and groups.gather("a word") == ["a word"] and groups.maxima([3, -2], "two") == [3, -2]
    assert [each.get("backend") for each in made] == ["gloo", None, "gloo"]  # that of the world, along dp, that of the mesh
    ProcessGroups(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), timeout=30)
    assert len(made) == 3, "made once"


def test_on_the_device_where_there_is_no_gloo(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nccl_alone(monkeypatch)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert host_group(world, [0], DEVICE, None) == (world, DEVICE)
