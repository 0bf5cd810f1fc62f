"""What a capture depends on beside the model and its call: versions, sources, flags of the process, the environment."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from autopar._torch_cache import flags, kernels_replaced, modes_active, tracing_options
from autopar.cache.encode import CannotStore
from autopar.cache.folder import FORMAT

_VERSIONS = ("torch", "transformers", "triton", "numpy", "timm", "accelerate", "peft")
# Variables of the environment that say where things lie and which process this is.
_NOT_READ = ("TORCHELASTIC_", "TORCHINDUCTOR_", "TORCH_NCCL_", "TORCH_HOME", "TORCH_LOGS", "TORCH_TRACE", "TORCH_FR_")


def surroundings() -> list[Any]:
    """In values that compare. Raises `CannotStore` where something is at work that nobody can describe."""
    if modes_active():
        raise CannotStore("a mode of torch (a fake or dispatch mode, `with torch.device(…)`) is active around the compile")
    environment = {name: value for name, value in os.environ.items() if name.startswith(("TORCH", "PYTORCH"))}
    return [
        FORMAT,
        _own_sources(),
        _files_of_torch(),
        (sys.version, sys.flags, sys.platform),
        [(name, getattr(sys.modules.get(name), "__version__", None)) for name in _VERSIONS],
        sorted((name, str(value)) for name, value in flags().items()),
        tracing_options(),
        kernels_replaced(),
        sorted(item for item in environment.items() if not item[0].startswith(_NOT_READ)),
        _functions_of_torch(),
        _global_hooks(),
    ]


def content_of(path: str) -> str:
    """The sum of a file; empty where there is none (code that was made at run time)."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


@cache
def _own_sources() -> str:
    """This package, as it is on the disk."""
    found = hashlib.sha256()
    for folder, names, files in os.walk(Path(__file__).resolve().parent.parent, followlinks=True):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for file in sorted(files):
            if file.endswith((".py", ".yaml")):
                found.update(f"{file} {content_of(os.path.join(folder, file))}".encode())
    return found.hexdigest()


@cache
def _files_of_torch() -> str:
    """torch as it is installed: somebody may have changed a line of it."""
    found = hashlib.sha256()
    for folder, names, files in os.walk(os.path.dirname(torch.__file__)):
        names[:] = sorted(name for name in names if name not in ("__pycache__", "include", "share", "testing"))
        for file in sorted(files):
            if file.endswith((".py", ".so")):
                status = os.stat(os.path.join(folder, file))
                found.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    return found.hexdigest()


def _global_hooks() -> list[str]:
    """Raises `CannotStore` where there are any."""
    found = [name for name, value in vars(nn.modules.module).items() if name.startswith("_global_") and "hooks" in name and value]
    if any("state_dict" not in name for name in found):
        raise CannotStore(f"hooks of all modules are registered ({', '.join(found)})")
    return found


def _functions_of_torch() -> str:
    """What functions stand under the names that models call: somebody may have put others there."""
    found: list[str] = []
    for holder in (torch, torch.nn.functional, torch.Tensor, nn.Module, nn.init, checkpoint):
        for name, value in sorted(vars(holder).items(), key=lambda item: item[0]):
            if callable(value) and not isinstance(value, type):
                code = getattr(value, "__code__", None)
                found.append(f"{name} {getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')} {code and code.co_filename}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
