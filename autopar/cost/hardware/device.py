"""What one device does in a second, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from autopar.cost.hardware.host import Host

# AdamW reads parameter, gradient and both moments and writes parameter and both moments.
UPDATE_PASSES = 7


@dataclass(frozen=True)
class Device:
    """One rank's device. `flops` lists (dtype name, FLOP/s); a dtype that is not listed runs at the slowest listed rate."""

    name: str
    flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second, read or written."""
    launch_seconds: float
    """What a kernel costs on top of its work."""
    source: str = field(default="", repr=False)
    host: Host = Host()
    """What the program takes that drives it."""

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """FLOP/s of contractions in `dtype`."""
        rates = dict(self.flops)
        return rates.get(str(dtype).removeprefix("torch."), min(rates.values()))
