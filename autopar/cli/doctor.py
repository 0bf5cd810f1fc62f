"""What there is to work with here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost.hardware.cluster import Cluster

# Beside what autopar cannot do without: what each is for.
OPTIONAL = {"triton": "our kernels on GPUs", "transformers": "config.json of models", "rich": "tables of the examples"}


def examined() -> dict[str, Any]:
    """By what was looked at."""
    found: dict[str, Any] = {"autopar": _version("autopar"), "python": platform.python_version(), "torch": torch.__version__}
    for package, purpose in OPTIONAL.items():
        found[package] = _version(package) or f"not installed ({purpose})"
    found["CPU cores"] = os.cpu_count()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found["GPUs"] = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        found["planned as"] = Cluster.of_device(names[0]).name
    else:
        found["GPUs"] = "none: models run on virtual ranks and on gloo processes"
    found["collectives"] = ", ".join(name for name, is_there in _BACKENDS.items() if is_there()) or "none"
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    found["C++ compiler"] = compiler or 'not found: on a CPU use backend="eager", or install g++'
    return found


_BACKENDS = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
