"""Parameters that lie in host memory, or in files, between their uses: tensors like others there, of which the device has copies.

On a GPU that memory is pinned, so that copies go beside what computes. On a CPU, whose allocator stands in for the device's, it is none of
that allocator's. Virtual ranks leave the caller's parameters where they are, on the CPU, but for files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.driver.compiled import Compiled
from autopar.errors import OffloadError
from autopar.runtime.offload.copier import Parked
from autopar.runtime.offload.layouts import stretches_of
from autopar.runtime.offload.memories import Block, HostMemory
from autopar.runtime.offload.state_files import StateFiles

# What a rank holds of the parameter of this name, where it will lie.
Store = Callable[[str, torch.Tensor], torch.Tensor]


def store_of(compiled: Compiled, device: torch.device) -> Store:
    """Moves what `compiled` says that it lies elsewhere than on the device; others stay as they are."""
    names, offload = compiled.stored, compiled.offload
    if not names or offload is None:
        return lambda _, part: part
    memory = StateFiles(offload.folder, "parameters") if offload.parameters == "file" and offload.folder else HostMemory(device)
    return lambda name, part: memory.like(part) if name in names else part


@torch.no_grad()
def store_global(model: nn.Module, compiled: Compiled) -> None:
    """Move the parameters of `model`, which all ranks of this process share, to files, if they are to lie there. Raises `OffloadError` for
    a model on a GPU, whose parameters are the caller's own tensors there."""
    stored = [(name, each) for name, each in model.named_parameters() if name in compiled.stored]
    on_device = next((name for name, each in stored if each.device.type != "cpu"), None)
    if on_device is not None:
        raise OffloadError(
            f"on a virtual mesh parameters are the model's own tensors, and {on_device!r} lies on a GPU: Offload(parameters=) would leave "
            'it there. Keep the model on the CPU, or run a process for each rank, one is enough: init_device_mesh("cuda", (1,), '
            'mesh_dim_names=("dp",))'
        )
    if compiled.offload is None or compiled.offload.parameters != "file":
        return
    store = store_of(compiled, torch.device("cpu"))
    for name, each in stored:
        each.data = store(name, each.data)


def lying(tensor: torch.Tensor, what: str) -> Parked:
    """A tensor of the host as what is away: COPY reads it where it lies. `what` is what errors call it."""
    for stretch, ((_, layout),) in stretches_of([tensor]):
        return Parked("host", what, Block(stretch, stretch.numel()), layout, tensor)
    return Parked("host", what, kept=tensor)
