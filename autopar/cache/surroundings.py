"""What a compile depends on besides the model and what was asked: versions, our own sources, what torch has been told, the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType

import torch

from autopar.cache._torch import overridden_ops, settings
from autopar.cache.describe import NotKnown, described
from autopar.kernels.registration import IMPLEMENTATIONS
from autopar.ops.rule import RULES, TAG_RULES

_PACKAGE = Path(__file__).parent.parent
_DEPENDENCIES = ("torch", "sympy", "numpy", "networkx", "highspy", "PyYAML", "safetensors")


def surroundings(device: str) -> tuple[str, ...]:
    """In words, of a model on devices of this type. Raises `NotKnown` where somebody else says how ops are split, or what ours run."""
    functions = (*RULES.values(), *TAG_RULES.values(), *IMPLEMENTATIONS.values())
    strange = next((each for each in functions if not isinstance(each, FunctionType) or not each.__module__.startswith("autopar.")), None)
    if strange is not None:
        raise NotKnown(f"{strange!r}, a rule or kernel of the user's")
    if overridden_ops():
        raise NotKnown(f"{overridden_ops()[0]}, a kernel of the user's")
    versions = (sys.version, torch.version.git_version, torch.version.cuda, *_installed())
    machine = (platform.machine(), torch.backends.cpu.get_cpu_capability())
    if device == "cuda" and torch.cuda.is_available():
        machine += (torch.cuda.get_device_name(), str(torch.cuda.get_device_capability()))
    return (*map(str, versions), *machine, _sources(), *map(described, settings()))


@cache
def _installed() -> tuple[str, ...]:
    try:
        return tuple(f"{name} {metadata.version(name)}" for name in _DEPENDENCIES)
    except metadata.PackageNotFoundError as error:
        raise NotKnown(f"the version of {error}") from error


@cache
def _sources() -> str:
    """A digest of all that this package is made of."""
    found = hashlib.sha256()
    for folder, names, files in os.walk(_PACKAGE, followlinks=True):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for file in sorted(files):
            path = Path(folder, file)
            found.update(f"{path.relative_to(_PACKAGE)}\n".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
