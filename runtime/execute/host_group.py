"""The group by which ranks tell each other numbers and objects: of the host, so that none waits for its device to say them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class HostGroup(NamedTuple):
    """`group` takes tensors on `device`."""

    group: dist.ProcessGroup
    device: torch.device


def host_group(like: dist.ProcessGroup, members: Sequence[int], device: torch.device, timeout: timedelta | None) -> HostGroup:
    """By which the ranks of `like`, those `members` of the world, speak: by itself where it takes tensors of the host, else, in a world of
    NCCL alone, by one of gloo that is made now, collectively over the world. Where there is no gloo they speak on `device`."""
    if takes_host_tensors(like):
        return HostGroup(like, torch.device("cpu"))
    if not dist.is_gloo_available():
        return HostGroup(like, device)
    made: Any = dist.new_group(list(members), timeout=timeout, backend="gloo")
    return HostGroup(made, torch.device("cpu"))


def takes_host_tensors(group: dist.ProcessGroup) -> bool:
    return any(part.startswith("cpu:") for part in dist.get_backend_config(group).split(","))
