"""The one number that all draws of one training step depend on."""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1


def random_key(seed: int, step: int) -> int:
    """A number in [0, 2**62) mixed from `seed` and `step`: the value of the "random_key" input.

    Neighbouring seeds and steps give unrelated keys. The mixer is the finaliser of SplitMix64
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    return _mix(_mix(seed & _MASK_64) ^ (step & _MASK_64)) >> 2


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK_64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK_64
    return word ^ (word >> 31)
