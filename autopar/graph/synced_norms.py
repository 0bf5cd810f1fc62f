"""`nn.SyncBatchNorm`: its sums over ranks are those of the global batch, which a program has as batch norms' own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import CaptureError


@contextmanager
def norms_of_the_batch(model: nn.Module) -> Generator[None]:
    """While this is entered, such norms compute as those of one process, on the batch that they are given; torch's refuse a CPU once there
    are processes, and would add up what is the global batch already. Raises `CaptureError` where one is told to take fewer ranks."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, nn.SyncBatchNorm)}
    for name, each in found.items():
        of_group = dist.get_world_size(each.process_group) if each.process_group is not None else None
        if of_group is not None and of_group != dist.get_world_size():
            raise CaptureError(
                f"{name!r} is a SyncBatchNorm over {of_group} of {dist.get_world_size()} ranks, and statistics are those of the global "
                "batch, whatever the mesh: leave process_group out"
            )
    if not found:
        yield
        return
    with mock.patch.object(nn.SyncBatchNorm, "forward", _of_one_process):
        yield


def _of_one_process(norm: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    return nn.BatchNorm1d.forward(norm, input)  # pyright: ignore[reportArgumentType]  (that of all batch norms, found as it is patched now)
