"""Numbers that Python asks of DTensors (`.item()`, `float()`, `bool()`), where torch's own answer is what one rank holds of a sum.

A bool decides what a program does next, which all ranks do alike, so all ask: `if torch.isnan(p.grad).any()` is answered by all of them. A
number is logged, by rank 0 alone in most scripts, which would wait for the others for ever: it is refused.
"""

from __future__ import annotations

import sys
import zlib
from os import sep
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime._torch import has_values, local_part
from autopar.runtime.execute.process_groups import naming
from autopar.runtime.module.gathers import ranks_along

# What makes one bool of those of all ranks, by torch's word for how the parts add up.
_OF_ALL = {"sum": torch.any, "max": torch.any, "product": torch.all, "min": torch.all}
_LIBRARIES = f"{Path(torch.__file__).parent}{sep}", f"{Path(__file__).parents[2]}{sep}", "<"


def number_of(tensor: DTensor) -> torch.Tensor:
    """What holds the number that is asked of `tensor`, on this rank. Collective where ranks hold parts of a bool.

    Raises `AutoparError` where they hold parts of another number, or do not ask for the same bool.
    """
    part = local_part(tensor)
    for axis, word in enumerate(tensor.placements):
        if word.is_partial() and tensor.device_mesh.size(axis) > 1 and has_values(part):
            kind: Any = getattr(word, "reduce_op", None)
            if part.dtype != torch.bool or kind not in _OF_ALL:
                raise AutoparError(
                    "a number is asked (.item(), float()) of a norm, a sum or the like of a parameter or gradient that is split over "
                    "ranks, of which this rank holds a part alone: torch would give another number on each rank. Call "
                    ".full_tensor().item(), on every rank; the norm of all gradients is parallel.clip_grad_norm_(float('inf'))"
                )
            part = _OF_ALL[kind](_bools_along(part, tensor.device_mesh, axis))
    return part


def _bools_along(part: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """The bools that the ranks along an axis hold."""
    place = _place_of_caller()
    mark = torch.tensor([0, zlib.crc32(place.encode())], device=part.device)
    mark[0] = part.reshape(())
    marks = [torch.empty_like(mark) for _ in range(mesh.size(axis))]
    ranks = ranks_along(mesh, axis)
    with naming(dist.get_rank(), [rank for rank in ranks if rank != dist.get_rank()], f"a bool of what is split over them, at {place}"):
        dist.all_gather(marks, mark, group=mesh.get_group(axis))
    found = torch.stack(marks)
    if (found[:, 1] != mark[1]).any():
        raise AutoparError(
            f"a bool is asked (if, bool(), .item()) of what is split over ranks {ranks}, at {place} on rank {dist.get_rank()} and "
            "elsewhere on others: each of them answers for its part, so all must ask in the same line, as often as each other"
        )
    return found[:, 0] != 0


def _place_of_caller() -> str:
    """File and line, outside of torch and of here, that asks."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
