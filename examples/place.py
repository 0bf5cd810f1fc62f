"""Where a training run lives: one process, a virtual mesh inside it, or one of several real ranks."""

from __future__ import annotations

import math
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from options import Options
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar


@dataclass(frozen=True)
class Place:
    """The mesh (None: plain PyTorch), this process's device, and whether it is the one that prints."""

    mesh: Any
    device: torch.device
    prints: bool
    description: str

    def share(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this process feeds of a global batch: its `dp` share on real ranks, elsewhere all of it."""
        if isinstance(self.mesh, DeviceMesh) and "dp" in (self.mesh.mesh_dim_names or ()):
            axis = self.mesh["dp"]
            batch = {name: value.tensor_split(axis.size())[axis.get_local_rank()] for name, value in batch.items()}
        return {name: value.to(self.device) for name, value in batch.items()}


def find_place(options: Options) -> Place:
    """Read the launcher's environment. Raises `SystemExit` when the mesh does not fit it."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if options.single:
        if num_processes > 1:
            raise SystemExit(f"--single is one process, and torchrun started {num_processes}")
        return Place(None, torch.device(options.device), True, f"plain PyTorch on {options.device}")
    axes = " × ".join(f"{name}={size}" for name, size in options.mesh.items())
    if "WORLD_SIZE" not in os.environ:
        return Place(autopar.virtual_mesh(**options.mesh), torch.device(options.device), True, f"a virtual mesh, {axes}, in this process")
    size = math.prod(options.mesh.values())
    if size != num_processes:
        raise SystemExit(f"--mesh asks for {axes} = {size} ranks, and torchrun started {num_processes}; make the two equal")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if options.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(options.device, tuple(options.mesh.values()), mesh_dim_names=tuple(options.mesh))
    return Place(mesh, device, os.environ["RANK"] == "0", f"{size} processes, {axes}, on {options.device}")


def choose_backend(wanted: str) -> tuple[str, str | None]:
    """The backend to use, and why it is not the wanted one: Inductor needs a C++ compiler and Python's headers."""
    if wanted != "inductor":
        return wanted, None
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    missing = ""
    if shutil.which(compiler) is None:
        missing = f"no C++ compiler ({compiler}) on this machine"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "Python's C headers are not installed on this machine"
    if missing:
        return "aot_eager", f"{missing}: backend aot_eager instead of inductor (slower, same numbers)"
    return wanted, None
