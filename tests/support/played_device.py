"""A device without values, in place of a GPU: tensors on meta, and ranks of which this process is the first and the others only seem to be.

What would make the host wait for a GPU (`.item()`, `.cpu()`, a branch on a value) raises here, and so does an op whose operands are on two
devices. What it computes is nothing: that ranks are exact is proved on gloo.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.execute import eager_function
from autopar.runtime.module import inputs
from autopar.runtime.module.captures import CapturingModule


def _group(options: Any, backend_options: Any) -> Any:
    return torch._C._distributed_c10d.FakeProcessGroup._create_internal(options.group_rank, options.group_size, backend_options)


@contextmanager
def played_mesh(patch: pytest.MonkeyPatch, **axes: int) -> Generator[DeviceMesh]:
    """A mesh on meta. Until it is left, meta counts as a device whose tensors have values."""
    if not hasattr(dist.Backend, "PLAYED"):
        dist.Backend.register_backend("played", _group, extended_api=True, devices=["cpu", "meta"])
    mesh_size = torch.Size(axes.values()).numel()
    checksum = inputs.checksum
    # Ops of ours look at values on a CPU and have kernels on a GPU: here they have what says shapes.
    patch.setattr(eager_function, "IMPLEMENTATIONS", {})
    patch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
    patch.setattr(CapturingModule, "named_parameters", nn.Module.named_parameters)  # those on meta are held elsewhere, elsewhere
    patch.setattr(inputs, "checksum", lambda tensor: "" if tensor.is_meta else checksum(tensor))
    patch.setattr(_mesh_resources, "num_devices_per_host", lambda device_type: mesh_size)  # by which torch 2.15 prices what it does
    dist.init_process_group("played", rank=0, world_size=mesh_size, store=FakeStore())
    try:
        yield init_device_mesh("meta", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()


class CopiesToDevice(TorchDispatchMode):
    """Notes the ops that make a tensor on meta of one in the memory of the host, for which a step would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> Self:
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if "cpu" in _devices((args, kwargs)) and "meta" in _devices(results):
            self.found.append(str(func))
        return results


def _devices(tree: Any) -> set[str]:
    return {each.device.type for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)}
