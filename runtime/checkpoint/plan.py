"""Who writes which piece: each part of each tensor once, by one of those that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.index import Piece, Stored, form_of
from autopar.runtime.checkpoint.slices import Slices, shape_of


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor, as it tells the others."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: Slices

    @property
    def num_bytes(self) -> int:
        return prod(shape_of(self.slices)) * self.dtype.itemsize


def file_of(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.safetensors"


def assign(told: Sequence[Sequence[Part]]) -> dict[str, dict[str, Stored]]:
    """Of what each rank holds, by kind and name where it is to be written.

    What several ranks hold goes, largest first, to the one of them that has least to write; equal on all ranks that compute it.
    Raises `CheckpointError` where ranks tell different dtypes or shapes of a tensor.
    """
    holders: dict[Part, list[int]] = {}
    forms: dict[tuple[str, str], Part] = {}
    for rank, parts in enumerate(told):
        for part in parts:
            first = forms.setdefault((part.kind, part.name), part)
            if (first.dtype, first.shape) != (part.dtype, part.shape):
                mine, other = form_of(part.dtype, part.shape), form_of(first.dtype, first.shape)
                raise CheckpointError(f"{part.kind} {part.name!r} is {mine} on rank {rank} and {other} on an earlier one")
            if part.num_bytes or not prod(part.shape):
                holders.setdefault(part, []).append(rank)
    loads = [0] * len(told)
    writers: dict[Part, int] = {}
    for part, ranks in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -item[0].num_bytes)):
        writers[part] = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writers[part]] += part.num_bytes
    found: dict[str, dict[str, Stored]] = {}
    for (kind, name), form in forms.items():
        found.setdefault(kind, {})[name] = Stored(form.dtype, form.shape, ())
    for part in holders:  # in the order in which they were told
        stored = found[part.kind][part.name]
        piece = Piece(file_of(part.kind, writers[part]), part.slices)
        found[part.kind][part.name] = Stored(stored.dtype, stored.shape, (*stored.pieces, piece))
    return found
