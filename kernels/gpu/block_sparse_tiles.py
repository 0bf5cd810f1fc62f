"""Tile sizes of the block-sparse kernels: dense attention's (`attention_tiles.py`), cut to the blocks of a layout.

Chosen so that every kernel compiles without spills and in the device's shared memory, and to wgmma or tcgen05 where blocks are of 64
and more and heads of 16 bits and at most 128; tests/kernels/compiled asserts it. Which of the tiles that fit is the fastest is for a
GPU to say.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from autopar.kernels.gpu import attention_tiles
from autopar.kernels.gpu.attention_tiles import Tiles

# Of float32 in blocks of 16: fewer warps leave each more registers, and none spills.
FLOAT32_KEYS_OF_16 = Tiles(16, 16, 2, 1)
# Where fetching ahead spills: generation and block size; for queries where heads do not fill the columns of their tile.
ONE_STAGE_KEYS = {("ampere", 16), ("blackwell", 32)}
ONE_STAGE_PARTIAL_QUERIES = {("ampere", 128)}
WIDE = 128


def forward_tiles(value: Tensor, columns: int, is_partial: bool, block: int) -> Tiles:
    """Of the forward, for heads in tiles of `columns`, which they fill or not (`is_partial`)."""
    return cut(attention_tiles.forward_tiles(value, columns, int(is_partial)), block, columns)


def keys_tiles(value: Tensor, columns: int, is_partial: bool, block: int) -> Tiles:
    """Of `block_sparse_keys`, which walks over blocks of queries; wide heads crowd it."""
    if value.dtype == torch.float32 and block == 16:
        return FLOAT32_KEYS_OF_16
    tiles = cut(attention_tiles.keys_tiles(value, columns, int(is_partial or columns > WIDE)), block, columns, by_keys=True)
    return replace(tiles, num_stages=1) if (attention_tiles.generation(value), block) in ONE_STAGE_KEYS else tiles


def queries_tiles(value: Tensor, columns: int, is_partial: bool, block: int) -> Tiles:
    """Of `block_sparse_queries`, which walks over blocks of keys; the walk over a list crowds it."""
    tiles = cut(attention_tiles.queries_tiles(value, columns, crowding=1), block, columns)
    has_one_stage = is_partial and (attention_tiles.generation(value), block) in ONE_STAGE_PARTIAL_QUERIES
    return replace(tiles, num_stages=1) if has_one_stage else tiles


def cut(tiles: Tiles, block: int, columns: int, by_keys: bool = False) -> Tiles:
    """Tiles of at most one block, and warps in proportion to the rows (`by_keys`: the keys) that they share out.

    wgmma wants four warps, and wide heads, which fill the registers by themselves, all that there were.
    """
    found = replace(tiles, queries=min(tiles.queries, block), keys=min(tiles.keys, block))
    if columns > WIDE:
        return found
    rows, before = (found.keys, tiles.keys) if by_keys else (found.queries, tiles.queries)
    return replace(found, num_warps=max(tiles.num_warps * rows // before, 4 if rows >= 64 else 1))
