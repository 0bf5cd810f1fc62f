"""Shares of the batch, where real ranks pass unequal ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class UnequalShares:
    """For each input with a batch dim: its flat index, that dim, and how many samples each place along dp passes, perhaps none."""

    inputs: tuple[tuple[int, int, tuple[int, ...]], ...]

    @cached_property
    def dims(self) -> Mapping[int, int]:
        """The batch dim by flat index."""
        return {index: dim for index, dim, _ in self.inputs}

    @cached_property
    def sizes(self) -> Mapping[int, tuple[int, ...]]:
        """The samples by flat index."""
        return {index: sizes for index, _, sizes in self.inputs}

    def of_size(self, size: int) -> tuple[int, ...]:
        """The shares of a value with `size` samples in all: those of an input of that size, or of one whose samples it has several times.

        None where no input fits.
        """
        every = sorted(self.sizes.values(), key=sum, reverse=True)
        fitting = next((sizes for sizes in every if size % sum(sizes) == 0), ())
        return tuple(count * size // sum(fitting) for count in fitting)
