"""Seconds and bytes as people read them."""

from __future__ import annotations

import math


def in_seconds(value: float, sign: bool = False) -> str:
    """`1.2 ms`."""
    plus = "+" if sign and value >= 0 else ""
    if not math.isfinite(value):
        return f"{plus}{value} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= scale:
            return f"{plus}{value / scale:.3g} {unit}"
    return f"{plus}{value / 1e-9:.3g} ns"


def in_bytes(value: float) -> str:
    """`12.6 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"
