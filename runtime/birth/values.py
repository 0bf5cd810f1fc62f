"""Where the values of a model's tensors come from, one tensor after another, so that no more than one is whole in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch

from autopar.ir.padding import Padding
from autopar.ir.sharding import Sharding
from autopar.runtime.module.parameters import Placement
from autopar.runtime.module.placement import held_part


class Values(Protocol):
    """Values by the first name of each tensor. Every rank asks for all tensors in the model's order.

    `identity` is equal on ranks that give the same values: by name what is known of them without computing or reading them.
    """

    identity: dict[str, object]

    def __contains__(self, name: str) -> bool:
        """Whether a tensor gets another value than it has."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU."""
        ...

    def part(self, name: str, placement: Placement, rank: int) -> torch.Tensor:
        """What `rank` holds of it: its part without the padding."""
        return held_part(self.whole(name), placement, rank)

    def elsewhere(self, name: str) -> None:
        """Called in place of the others where this rank holds nothing of it."""


def held_ranges(placement: Placement, rank: int) -> list[list[tuple[int, int]]]:
    """For each dim which indices of the whole `rank` holds, as runs (start, end), in order: a part is their product."""
    splits, padding, found = iter(placement.sharding.splits), placement.padding, []
    for number, dim in enumerate(placement.dims):
        own = Sharding(tuple(itertools.islice(splits, len(dim))))
        padded = None if padding is None else Padding((padding.before[number],), (padding.after[number],))
        along = Placement((dim,), own, placement.mesh, padded)
        found.append(_runs(held_part(torch.arange(along.shape[0]), along, rank).tolist()))
    return found


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found
