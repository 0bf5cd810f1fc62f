"""Identity ops of a GLOBAL graph, so that a value can have another sharding from there on. Lowering to LOCAL removes them."""

from __future__ import annotations

import torch


def save(x: torch.Tensor) -> torch.Tensor:
    """x, in the sharding in which it is kept in memory until the backward has read it."""
    return x


def pinned(x: torch.Tensor) -> torch.Tensor:
    """x, in the sharding that the user pinned the output of a module to."""
    return x


def reduced(x: torch.Tensor) -> torch.Tensor:
    """x, no longer a partial sum: reduced over ranks once, so that all readers see the same bits, however they want it split."""
    return x


def held(x: torch.Tensor) -> torch.Tensor:
    """x, a copy of a parameter, in the sharding in which it is there all step: made once, ahead of the first microbatch."""
    return x


def recut(x: torch.Tensor) -> torch.Tensor:
    """x, in other atoms: a parameter, or its gradient, where it lies in parts that the atoms of its readers cannot say."""
    return x


MARKERS = frozenset({save, pinned, reduced, held, recut})
