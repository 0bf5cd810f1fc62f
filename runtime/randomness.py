"""The key that all random draws of a call descend from."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): each input bit flips each output bit with probability one half."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def random_key(seed: int, step: int) -> int:
    """A signed 64-bit key. Seed and step are mixed one inside the other, so that (seed + 1, step) and (seed, step + 1) have nothing in common."""
    key = _mix(_mix(seed & _MASK) ^ _mix(step & _MASK ^ 0xD1B54A32D192ED03))
    return key - (1 << 64) if key >> 63 else key
