"""Padding of sizes that a mesh axis does not divide: some atoms of a value are enlarged, and what is added is zero.

A vocabulary of 97 on tp = 4 is stored as 100 words, 25 a rank: the last rank holds 22 words and 3 rows of zeros.
What is added to the user's batch repeats its first sample instead: whatever the model divides by or looks up, it can with that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Dims, Sharding, carried, flat, shape_of


@dataclass(frozen=True)
class Padding:
    """The atoms of a value without its padding and with it: as many in each dim, each as long or longer `after`.

    The elements of the value come first along every atom.
    """

    before: Dims
    after: Dims

    def pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of the shape of `before`, copied into zeros of the shape of `after`."""
        whole = tensor.new_zeros(flat(self.after))
        whole[self._elements].copy_(tensor.detach().reshape(flat(self.before)))
        return whole.view(shape_of(self.after))

    def repeat_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `pad`, but along each atom its first element is repeated."""
        whole = tensor.detach().reshape(flat(self.before))
        for position, (before, after) in enumerate(zip(flat(self.before), flat(self.after), strict=True)):
            if before != after:
                first = whole.narrow(position, 0, 1)
                whole = torch.cat([whole, *[first] * (after - before)], position)
        return whole.reshape(shape_of(self.after))

    def unpad(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of the shape of `after` without the padding: contiguous, a view where that is possible."""
        return tensor.reshape(flat(self.after))[self._elements].reshape(shape_of(self.before)).contiguous()

    @property
    def _elements(self) -> tuple[slice, ...]:
        return tuple(slice(size) for size in flat(self.before))

    def local(self, sharding: Sharding, mesh: Mesh, rank: int) -> Padding:
        """The padding inside the part that lies with `rank`: all of an atom may be padding there."""
        after, splits = sharding.local_dims(self.after, mesh), iter(sharding.splits)

        def held(size: int, local: int) -> int:
            return min(max(size - mesh.index(rank, next(splits)) * local, 0), local)

        pairs = zip(self.before, after, strict=True)
        return Padding(tuple(tuple(held(*sizes) for sizes in zip(*pair, strict=True)) for pair in pairs), after)


def padded(tensor: torch.Tensor, padding: Padding | None) -> torch.Tensor:
    return tensor if padding is None else padding.pad(tensor)


def unpadded(tensor: torch.Tensor, padding: Padding | None) -> torch.Tensor:
    return tensor if padding is None else padding.unpad(tensor)


def carried_over(sharding: Sharding, dims: Sequence[Dims], paddings: Sequence[Padding | None], mesh: Mesh) -> Sharding | None:
    """`sharding` of a value in words of other atoms, as `carried`; both may be padded, unequally. Pairs are (old, new)."""
    logical = [padding.before if padding else each for each, padding in zip(dims, paddings, strict=True)]
    if paddings[0] != paddings[1] and logical[0] == logical[1]:
        return sharding  # atom by atom; whether they divide is for the caller to see
    return carried(sharding, dims[0], dims[1], mesh)
