"""What is said of the machine beside figures of whole training steps, and the memory that such a step takes."""

from __future__ import annotations

import math
import resource
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_case import Place, Row
from benchmarks.reporting import machine

# The largest difference of a loss from one process's, in nats, by the dtype of parameters. Updates in bfloat16 round.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def environment(place: Place, **more: Any) -> dict[str, Any]:
    """torch, driver and device, with `more`."""
    found: dict[str, Any] = {**machine(), "device": "cpu", **more}
    if place.on_gpu:
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": _driver()}
        nccl: Any = getattr(torch.cuda, "nccl")  # noqa: B009  (which torch's own package does not name)
        found |= {"nccl": ".".join(map(str, nccl.version())), "capability": torch.cuda.get_device_capability()}
    return found


def largest_difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """Of the steps that both made; NaN where a loss is, which `max` would pass over."""
    found = [abs(one - other) for one, other in zip(losses, wanted, strict=False)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def is_good(row: Row, dtype: torch.dtype) -> bool:
    """Whether a job of autopar ran and had the losses that it should; a peer's failure is its own."""
    return not row["job"].startswith("autopar") or (not row["error"] and row["off by"] <= TOLERANCE[dtype])


def without_nan(rows: Sequence[Row]) -> list[Row]:
    """For JSON, which has no NaN: what is not known is null there."""
    return [{key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()} for row in rows]


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def begin_peak(place: Place) -> int:
    """Bytes that are taken now, from which `allocated_peak` counts."""
    if not place.on_gpu:
        return _resident_peak()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def allocated_peak(place: Place, before: int) -> int:
    """The most since then, beyond what was taken: of the allocator, on a CPU of the resident set, whose peak nobody resets."""
    return (torch.cuda.max_memory_allocated() if place.on_gpu else _resident_peak()) - before


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
