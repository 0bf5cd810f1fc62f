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


# Of what crowds a tile (`Masks.crowding`): documents, more than these beside a mask.
DOCUMENTS = 3

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
# Beside documents, whose ids take 64 bits, by generation and size of heads, where smaller steps would still spill. First with or
# without a mask, then with one.
DOCUMENTS_FORWARD = {(each, 64): Tiles(128, 32, 8, 3) for each in ("ampere", "hopper", "blackwell")}
DOCUMENTS_MASK_FORWARD = DOCUMENTS_FORWARD | {("blackwell", 256): Tiles(64, 32, 8, 2)}
DOCUMENTS_MASK_KEYS = {
    ("ampere", 64): Tiles(16, 128, 8, 1),
    ("ampere", 128): Tiles(16, 32, 8, 2),
    ("ampere", 256): Tiles(16, 16, 8, 1),
    ("blackwell", 64): Tiles(32, 64, 8, 1),
}
DOCUMENTS_MASK_QUERIES = {("ampere", 256): Tiles(32, 32, 8, 1)}
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
    """Of the forward. `crowding` is what else takes registers of a tile, 0 to 4 (`Masks.crowding`): it walks in smaller steps."""
    if crowding >= DOCUMENTS and (own := _own(value, block_size, DOCUMENTS_MASK_FORWARD if crowding > DOCUMENTS else DOCUMENTS_FORWARD)):
        return own
    tiles = _entry(value, block_size, FORWARD, FLOAT32_FORWARD)
    return replace(tiles, keys=max(tiles.keys >> (2 if crowding > DOCUMENTS else min(crowding, 1)), 16))


def keys_tiles(value: Tensor, block_size: int, crowding: int) -> Tiles:
    """Of `for_keys`, which walks over queries."""
    if crowding > DOCUMENTS and (own := _own(value, block_size, DOCUMENTS_MASK_KEYS)):
        return own
    tiles = _entry(value, block_size, KEYS, FLOAT32_KEYS)
    if crowding and block_size > 128 and (own := CROWDED_KEYS.get(generation(value))):
        return own
    if crowding > DOCUMENTS and value.dtype == torch.float32:
        tiles = replace(tiles, keys=tiles.keys // 2)
    return replace(tiles, queries=max(tiles.queries >> (crowding - 2 if crowding >= DOCUMENTS else crowding), 16))


def queries_tiles(value: Tensor, block_size: int, crowding: int) -> Tiles:
    """Of `for_queries` and `for_mask`."""
    if crowding > DOCUMENTS and (own := _own(value, block_size, DOCUMENTS_MASK_QUERIES)):
        return own
    tiles = _entry(value, block_size, QUERIES, FLOAT32_QUERIES)
    if crowding >= DOCUMENTS and value.dtype == torch.float32:
        tiles = replace(tiles, num_warps=8)
    if crowding and block_size > 128 and (own := CROWDED_QUERIES.get(generation(value))):
        return own
    return replace(tiles, keys=max(tiles.keys >> min(crowding, 1), 16))


def _own(value: Tensor, block_size: int, table: dict[tuple[str, int], Tiles]) -> Tiles | None:
    size = next(each for each in (64, 128, 256) if block_size <= each)
    return None if value.dtype == torch.float32 else table.get((generation(value), size))


def _entry(value: Tensor, block_size: int, table: dict[str, Row], float32: Tiles) -> Tiles:
    if value.dtype == torch.float32:
        return float32
    return table[generation(value)][0 if block_size <= 64 else 1 if block_size <= 128 else 2]
