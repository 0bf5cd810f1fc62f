"""Tile sizes of the attention kernels: data, by generation of the device, dtype and head size.

Chosen so that every kernel compiles without spills, in the device's shared memory and to its matrix instructions, which
tests/kernels/compiled asserts. wgmma wants 64 rows and four warps; `for_keys` of heads of 256 has no room for them, and
multiplies as on Ampere. Which of the tiles that fit is the fastest is for a GPU to say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, warps and pipeline stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# What crowds a tile (`crowding` of `attention_masks.py`): nothing, a mask, dropout, both, documents, documents beside any of them.
NOTHING, MASK, DROPS, DROPS_MASK, DOCUMENTS, DOCUMENTS_MASK = range(6)

# Of heads of at most 64, 128 and 256.
Row = tuple[Tiles, Tiles, Tiles]
FORWARD: dict[str, Row] = {
    "ampere": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 2)),
    "hopper": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 2)),
    "blackwell": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 2)),
    "amd": (Tiles(128, 64, 4, 1), Tiles(128, 64, 4, 1), Tiles(64, 32, 4, 1)),
}
KEYS: dict[str, Row] = {
    "ampere": (Tiles(32, 128, 8, 2), Tiles(32, 64, 8, 2), Tiles(32, 32, 8, 1)),
    "hopper": (Tiles(64, 128, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 32, 8, 1)),
    "blackwell": (Tiles(64, 128, 8, 1), Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 1)),
    "amd": (Tiles(32, 64, 4, 1), Tiles(32, 64, 4, 1), Tiles(16, 32, 4, 1)),
}
QUERIES: dict[str, Row] = {
    "ampere": (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 1)),
    "hopper": (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 16, 4, 1)),
    "blackwell": (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 1)),
    "amd": (Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 1), Tiles(32, 16, 4, 1)),
}
# Heads of more than 128 that a mask, a window or a soft cap crowds: smaller steps would still spill, smaller blocks do not.
CROWDED_KEYS, CROWDED_QUERIES = {"blackwell": Tiles(32, 32, 8, 1)}, {"hopper": Tiles(32, 32, 4, 1)}
# Where smaller steps would still spill, by what crowds the tile, generation and size of heads. Of a draw 64 bits are held for every column,
# as of a document's id; more warps hold fewer columns each.
Own = dict[int, dict[tuple[str, int], Tiles]]
_WIDE = {(each, size): Tiles(128, 64, 8, 3) for each in ("ampere", "hopper", "blackwell") for size in (64, 128)}
_DRAWN = _WIDE | {("ampere", 128): Tiles(64, 32, 4, 3)}
_IDS = {(each, 64): Tiles(128, 32, 8, 3) for each in ("ampere", "hopper", "blackwell")}
OWN_FORWARD: Own = {
    DROPS: _DRAWN,
    DROPS_MASK: _DRAWN,
    DOCUMENTS: _IDS,
    DOCUMENTS_MASK: _IDS | {("blackwell", 256): Tiles(64, 32, 8, 2)},
}
OWN_KEYS: Own = {
    MASK: {("ampere", 64): Tiles(16, 128, 8, 1)},
    DROPS_MASK: {
        ("ampere", 64): Tiles(16, 128, 8, 1),
        ("ampere", 128): Tiles(32, 32, 8, 2),
        ("blackwell", 256): Tiles(16, 32, 8, 1),
    },
    DOCUMENTS_MASK: {
        ("ampere", 64): Tiles(16, 128, 8, 1),
        ("ampere", 128): Tiles(16, 32, 8, 2),
        ("ampere", 256): Tiles(16, 16, 8, 1),
        ("blackwell", 64): Tiles(32, 64, 8, 1),
    },
}
OWN_QUERIES: Own = {DROPS_MASK: {("hopper", 256): Tiles(32, 16, 4, 1)}, DOCUMENTS_MASK: {("ampere", 256): Tiles(32, 32, 8, 1)}}
# float32, heads of at most 64: every product is three of them on NVIDIA's matrix units, and their operands fill the registers.
FLOAT32_FORWARD, FLOAT32_KEYS, FLOAT32_QUERIES = Tiles(32, 32, 4, 2), Tiles(16, 32, 8, 1), Tiles(32, 32, 4, 1)


def generation(value: Tensor) -> str:
    """Which row of the tables serves the device of `value`."""
    if torch.version.hip is not None:
        return "amd"
    major = torch.cuda.get_device_capability(value.device)[0] if value.is_cuda else 8
    # 12 is Blackwell without its tensor memory: it multiplies as Ampere does, in less shared memory.
    return {9: "hopper", 10: "blackwell"}.get(major, "ampere")


def forward_tiles(value: Tensor, block_size: int, crowding: int) -> Tiles:
    """Of the forward. `crowding` is what else takes registers of a tile, NOTHING to DOCUMENTS_MASK: it walks in smaller steps."""
    if own := _own(value, block_size, crowding, OWN_FORWARD):
        return own
    tiles = _entry(value, block_size, FORWARD, FLOAT32_FORWARD)
    if crowding in (DROPS, DROPS_MASK) and value.dtype == torch.float32:
        tiles = replace(tiles, num_warps=8)
    return replace(tiles, keys=max(tiles.keys >> (2 if crowding == DOCUMENTS_MASK else min(crowding, 1)), 16))


def keys_tiles(value: Tensor, block_size: int, crowding: int) -> Tiles:
    """Of `for_keys`, which walks over queries."""
    if own := _own(value, block_size, crowding, OWN_KEYS):
        return own
    tiles = _entry(value, block_size, KEYS, FLOAT32_KEYS)
    if crowding and block_size > 128 and (own := CROWDED_KEYS.get(generation(value))):
        return own
    has_both = crowding in (DROPS_MASK, DOCUMENTS_MASK)
    if has_both and value.dtype == torch.float32:
        tiles = replace(tiles, keys=tiles.keys // 2)
    return replace(tiles, queries=max(tiles.queries >> (2 if has_both else min(crowding, 1)), 16))


def queries_tiles(value: Tensor, block_size: int, crowding: int) -> Tiles:
    """Of `for_queries` and `for_mask`."""
    if own := _own(value, block_size, crowding, OWN_QUERIES):
        return own
    tiles = _entry(value, block_size, QUERIES, FLOAT32_QUERIES)
    if crowding > MASK and value.dtype == torch.float32:
        tiles = replace(tiles, queries=tiles.queries >> int(crowding == DROPS_MASK), num_warps=8)
    if crowding and block_size > 128 and (own := CROWDED_QUERIES.get(generation(value))):
        return own
    return replace(tiles, keys=max(tiles.keys >> min(crowding, 1), 16))


def _own(value: Tensor, block_size: int, crowding: int, tables: Own) -> Tiles | None:
    size = next(each for each in (64, 128, 256) if block_size <= each)
    return None if value.dtype == torch.float32 else tables.get(crowding, {}).get((generation(value), size))


def _entry(value: Tensor, block_size: int, table: dict[str, Row], float32: Tiles) -> Tiles:
    if value.dtype == torch.float32:
        return float32
    return table[generation(value)][0 if block_size <= 64 else 1 if block_size <= 128 else 2]
