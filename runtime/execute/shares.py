"""Unequal shares of the batch at the border of real ranks: users' samples come in and go out by share, ranks compute equal parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.ir.mesh import Mesh, parent
from autopar.ir.padding import unpadded
from autopar.ir.program import Input, Output
from autopar.ir.sharding import Sharding
from autopar.runtime.module.parameters import assemble


def joined(share: torch.Tensor, item: Input, gather: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> torch.Tensor:
    """The whole of an input of which each place along dp has its share; `gather` gives what each of these has, in order. Collective."""
    assert item.batch_dim is not None, item
    own, dim = _opened(share.detach(), item), item.batch_dim + 1
    shape = list(own.shape)
    shape[dim] = max(item.shares)  # what ranks exchange is equally long
    longest = own.new_zeros(shape)
    longest.narrow(dim, 0, own.shape[dim]).copy_(own)
    whole = torch.cat([part.narrow(dim, 0, size) for part, size in zip(gather(longest), item.shares, strict=True)], dim)
    return whole.flatten(item.batch_dim, dim)


def own_share(
    part: torch.Tensor,
    item: Output,
    mesh: Mesh,
    rank: int,
    gather: Callable[[tuple[str, ...], Mesh, torch.Tensor], Sequence[torch.Tensor]],
) -> torch.Tensor:
    """The samples of `rank`'s user in an output of which the rank computed `part`, an equal one. Collective.

    `gather` gives what each rank along some axes has, in order.
    """
    assert item.sharding is not None, item
    along = Sharding(tuple(tuple(axis for axis in split if parent(axis) == "dp") for split in item.sharding.splits))
    axes = tuple(axis for axis in mesh.names if axis in along.axes)
    only_these = mesh.without(*(axis for axis in mesh.names if axis not in axes))
    whole = assemble(dict(enumerate(gather(axes, mesh, part))), item.dims, along, only_these)
    return share_of(unpadded(whole, item.padding), item, mesh, rank)


def share_of(whole: torch.Tensor, item: Input | Output, mesh: Mesh, rank: int) -> torch.Tensor:
    """The samples of `rank` in a value of which real ranks have unequal shares."""
    assert item.batch_dim is not None, item
    place = mesh.index(rank, mesh.parts("dp"))
    found = _opened(whole, item).narrow(item.batch_dim + 1, sum(item.shares[:place]), item.shares[place])
    return found.clone(memory_format=torch.contiguous_format).flatten(item.batch_dim, item.batch_dim + 1)


def _opened(value: torch.Tensor, item: Input | Output) -> torch.Tensor:
    """Its views and the samples of one as two dims."""
    assert item.batch_dim is not None, item
    return value.unflatten(item.batch_dim, (item.views, value.shape[item.batch_dim] // item.views))
