"""Which attention kernel was measured to be the fastest, by device, head size, length and causality: data, `attention_rates.csv`.

"aten" is torch's own (FlashAttention-2, cuDNN), "triton" one written in Triton. Where autopar's own kernels were measured on a device
(rows of "autopar", as `benchmarks/attention_rates.py` writes them from a run on a GPU) only such runs count there: on H100s, and
on H200s by theirs. Elsewhere rows of papers do, whose Triton kernels are of the same design and not ours.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_suffix(".csv")
OURS = "autopar"
# Devices with the same matrix units, by which rows hold for both.
_SAME_UNITS = {"h200": "h100", "a100-40gb": "a100"}


@dataclass(frozen=True)
class Rate:
    """TFLOP/s of `who`, one of the kernels "aten" or "triton", in 16 bits. `direction`: "forward", or "both" with the backward.

    `run` tells measurements taken side by side: rows are compared within one.
    """

    device: str
    direction: str
    head_size: int
    is_causal: bool
    length: int
    kernel: str
    who: str
    tflops: float
    run: str

    def distance(self, head_size: int, length: int) -> float:
        """How far its shape is from another; a factor of two in either size is 1."""
        return abs(math.log2(self.head_size / head_size)) + abs(math.log2(self.length / length))


@dataclass(frozen=True)
class Winner:
    """The fastest kernel, and the rate of the best of the other kind in the same run."""

    rate: Rate
    other: Rate

    @property
    def kernel(self) -> str:
        return self.rate.kernel

    def __str__(self) -> str:
        rate, direction = self.rate, "forward" if self.rate.direction == "forward" else "forward and backward"
        shape = f"{rate.device}, heads of {rate.head_size}, {rate.length} rows, {'causal' if rate.is_causal else 'full'}, {direction}"
        return f"{rate.who} {rate.tflops:g} TFLOP/s, {self.other.who} {self.other.tflops:g} ({shape})"


def winner(device: str, head_size: int, length: int, is_causal: bool, rates: tuple[Rate, ...] | None = None) -> Winner | None:
    """What was the fastest at the measured shape nearest to this one; None where nothing of the `device` was measured."""
    found = _of_device(device, table() if rates is None else rates)
    found = [rate for rate in found if rate.is_causal == is_causal]
    if not found:
        return None
    nearest = min(found, key=lambda rate: rate.distance(head_size, length))
    side_by_side = [rate for rate in found if _shape(rate) == _shape(nearest)]
    best = max(side_by_side, key=lambda rate: rate.tflops)
    others = [rate for rate in side_by_side if rate.kernel != best.kernel]
    return Winner(best, max(others, key=lambda rate: rate.tflops)) if others else None


@cache
def table() -> tuple[Rate, ...]:
    """The rows that come with autopar."""
    return read(_TABLE.read_text(encoding="utf-8"))


def read(text: str) -> tuple[Rate, ...]:
    """Rows of CSV."""
    return tuple(
        Rate(
            device=row["device"],
            direction=row["direction"],
            head_size=int(row["head_size"]),
            is_causal=row["is_causal"] == "1",
            length=int(row["length"]),
            kernel=row["kernel"],
            who=row["who"],
            tflops=float(row["tflops"]),
            run=row["run"],
        )
        for row in csv.DictReader(text.splitlines())
    )


def _of_device(device: str, rates: tuple[Rate, ...]) -> list[Rate]:
    """Those of runs that ours took part in, where there are any; both directions rather than the forward alone."""
    for name in (device, _SAME_UNITS.get(device, device)):
        found = [rate for rate in rates if rate.device == name]
        runs = {rate.run for rate in found if rate.who == OURS}
        found = [rate for rate in found if not runs or rate.run in runs]
        both = [rate for rate in found if rate.direction == "both"]
        if found:
            return both or found
    return []


def _shape(rate: Rate) -> tuple[object, ...]:
    return rate.run, rate.direction, rate.head_size, rate.length
