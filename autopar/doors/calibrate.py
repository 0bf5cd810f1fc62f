"""The door to measurements, `autopar.calibrate`: the hardware that this program runs on, and on a CPU what the program takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.cost.hardware import calibrate as hardware
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.host import Host
from autopar.doors.compile import compile
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.runtime.execute.flights import measurable
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.verify.host_seconds import runtime_seconds, update_seconds
from autopar.runtime.verify.profile import Profile
from autopar.runtime.verify.recalibration import recalibrated

# A model of small parameters: what it computes is of no account.
_LAYERS, _WIDTH, _SAMPLES, _MICROBATCHES = 64, 8, 2, 4
_REPEATS = 15


def calibrate(mesh: Any = None, path: str | Path | None = None, profile: Profile | None = None) -> Cluster:
    """The cluster that this process runs on, measured; written as YAML to `path`, where given.

    Call it on every rank of `torch.distributed` with the same DeviceMesh (named axes), all ranks of the world on it:
    links are then measured along each axis. Without a mesh the whole world is one group. In a process without
    `torch.distributed` the device alone is measured; links that were not measured are a built-in cluster's, and their source
    says so. All ranks get the same cluster. Takes seconds. What was measured is kept on this machine: `explain()` says seconds by it.

    On a CPU a small model of its own is compiled and run, for what the program takes beside the ops (`host:` in the file).

    With a `profile` (`parallel.profile(...)`) nothing is measured: the cluster that its program was priced by is corrected, speed by speed,
    by what its steps took (`autopar/runtime/verify/recalibration.py`). A profile of virtual ranks says nothing of links, and its cluster is
    not kept.

    Raises `MeshError` for a mesh without names, of virtual ranks, or of a part of the world, `AutoparError` for a mesh beside a profile.
    """
    if profile is not None:
        if mesh is not None:
            raise AutoparError("calibrate(mesh, profile=...): a profile is of the mesh that its program ran on; leave out one of the two")
        cluster = recalibrated(profile)
        hardware.write(cluster, path, None if profile.is_virtual else profile.program.device)
        return cluster
    return hardware.calibrate(mesh, path, host_of_runtime, measurable)


class _Scales(nn.Module):
    """Layer by layer a scale and a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(_WIDTH)) for _ in range(_LAYERS))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(_WIDTH)) for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            x = x * scale + shift
        return x.square().mean()


def host_of_runtime() -> Host:
    """What an instruction takes, and a parameter and its update: DTensors on processes. Collective."""
    many, few = ({"x": torch.ones(number, _WIDTH)} for number in (_MICROBATCHES, _SAMPLES))
    by_microbatch = _compiled(virtual_mesh(dp=1), many, _MICROBATCHES)
    instruction = runtime_seconds(by_microbatch, many, _REPEATS).instruction_seconds
    parallel = _compiled(_own_mesh(), few)
    parameter = runtime_seconds(parallel, few, _REPEATS).parameter_seconds
    return Host(instruction, parameter_seconds=parameter, update_seconds=update_seconds(parallel, _REPEATS))


def _compiled(mesh: Mesh | DeviceMesh, batch: dict[str, Tensor], num_microbatches: int = 1) -> ParallelModule:
    return compile(_Scales(), mesh, example_inputs=batch, num_microbatches=num_microbatches, backend="eager", cluster="cpu")


def _own_mesh() -> Mesh | DeviceMesh:
    """All processes, or this one."""
    is_distributed = dist.is_available() and dist.is_initialized()
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)) if is_distributed else virtual_mesh(dp=1)
