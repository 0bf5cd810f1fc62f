"""Which tiles documents let the attention kernels leave out: decided before they run, from the least and largest id of each tile.

    ids of keys →    0 0 0 0│0 1 1 1│1 1 2 2
    queries 0 0 1 1    ■       ■       ■          ids 0…1 meet 0…0, 0…1 and 1…2
            1 1 2 2    ·       ■       ■          ids 1…2 meet 0…1 and 1…2

Where every document lies in one piece, what is left between the bounds is little more than what is attended to. Any other order of
ids is right as well: the kernels compare ids one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bounds(own: Tensor, block: int, others: Tensor, other_block: int) -> Tensor:
    """int32 [B, tiles, 2]: for each tile of `block` ids in `own` [B, S], where the walk over `others` [B, T] starts and ends.

    Both are positions, multiples of `other_block` (the end may lie behind T); equal where nothing is to be walked over. Either B may be 1.
    """
    least, largest = _ranges(own, block)
    other_least, other_largest = _ranges(others, other_block)
    meets = (least[:, :, None] <= other_largest[:, None, :]) & (other_least[:, None, :] <= largest[:, :, None])
    # Bytes, of which argmax gives the first largest.
    meets = meets.to(torch.uint8)
    first, last = meets.argmax(-1), meets.shape[-1] - meets.flip(-1).argmax(-1)
    found = torch.stack([first, last], -1).masked_fill_(meets.amax(-1, keepdim=True) == 0, 0)
    return found.to(torch.int32) * other_block


def _ranges(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The least and the largest id of each tile, [B, tiles]; the last tile is filled up with the last id."""
    length = ids.shape[-1]
    num_tiles = -(-length // block)
    positions = torch.arange(num_tiles * block, device=ids.device).clamp_(max=length - 1)
    return torch.aminmax(ids[:, positions].unflatten(-1, (num_tiles, block)), dim=-1)
