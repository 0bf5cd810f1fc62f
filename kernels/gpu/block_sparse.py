"""Triton kernel of `autopar::block_sparse_attention`: see `autopar/kernels/block_sparse.py` for what it computes.

The layout becomes lists: for each block of queries the blocks of keys that it attends to, ascending, and how many there are. A program
holds queries of one block and walks over its list; what is not listed costs nothing. Only the last listed block can be ragged or on the
diagonal, and is walked over with predicates (EDGE).

      layout          lists     counts
    ■ · · ·           0 - - -     1
    ■ ■ · ·           0 1 - -     2
    · ■ ■ ·           1 2 - -     2
    ■ · ■ ■           0 2 3 -     3

`block_sparse_backward.py` walks over the lists of the transposed layout, too. A block may be walked over in several steps.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.block_sparse_reference import BlockOptions
from autopar.kernels.gpu.attention_scores import LOG2_E, block_of, load_rows, precision_of, require_addressable, rows_contiguous
from autopar.kernels.gpu.block_sparse_tiles import forward_tiles
from autopar.kernels.registration import launch


class Lists(NamedTuple):
    """Of every block along one side of a layout the blocks of the other that it meets, for each head."""

    blocks: Tensor  # int32 [B, H, N, M], ascending; what follows the first counts[b, h, n] of a row is never read
    counts: Tensor  # int32 [B, H, N]

    def strides(self) -> tuple[int, ...]:
        return *self.blocks.stride()[:3], *self.counts.stride()[:2]


def listed(layout: Tensor, batch: int, heads: int, is_causal: bool, of_keys: bool = False) -> Lists:
    """The lists of a bool layout, (batch,) heads, blocks of queries, blocks of keys; `of_keys`: of its blocks of keys.

    Computed where the layout is, without waiting for it. What batch or heads share is held once.
    """
    layout = layout.reshape((1,) * (4 - layout.dim()) + layout.shape)
    layout = layout.tril() if is_causal else layout
    layout = (layout.mT if of_keys else layout).to(torch.int8)
    # A sort keeps strides; kernels read along a list without one.
    blocks = layout.argsort(dim=-1, descending=True, stable=True).to(torch.int32).contiguous()
    counts = layout.sum(-1, dtype=torch.int32)
    return Lists(blocks.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1))


@triton.jit
def _walk(
    sums, total, largest, query, s, key, value, key_t, value_t, blocks, first, last, key_length, scale, column, value_column,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys of the listed blocks from `first` to `last` into the running sums, totals and maxima of the queries."""
    STEPS: tl.constexpr = BLOCK // KEYS
    for step in range(first * STEPS, last * STEPS):
        t = tl.load(blocks + step // STEPS) * BLOCK + step % STEPS * KEYS + tl.arange(0, KEYS)  # type: ignore[operator]
        transposed = load_rows(key, t[None, :], key_t, column[:, None], key_length, SIZE, COLUMNS, SIZE)
        score = tl.dot(query, transposed, input_precision=PRECISION) * (scale * LOG2_E)
        if EDGE:
            attends = (t < key_length)[None, :]
            if CAUSAL:
                attends = attends & (t[None, :] <= s[:, None])
            score = tl.where(attends, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        power = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(power, 1)
        held = load_rows(value, t[:, None], value_t, value_column[None, :], key_length, VALUE_SIZE, VALUE_COLUMNS, VALUE_SIZE)
        sums = tl.dot(power.to(held.dtype), held, sums * shrink[:, None], input_precision=PRECISION)
        largest = larger
    return sums, total, largest


@triton.jit
def block_sparse_forward(
    query, key, value, blocks, counts, out, log_sum_exp,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, blocks_b, blocks_h, blocks_n, counts_b, counts_h,
    out_b, out_h, out_s, heads, heads_per_key, length, key_length, scale,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The last blocks see the most keys where causal: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    group = head // heads_per_key
    block = tile * QUERIES // BLOCK
    s = tile * QUERIES + tl.arange(0, QUERIES)
    column, value_column = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    query += batch * query_b + head * query_h
    key += batch * key_b + group * key_h
    value += batch * value_b + group * value_h
    blocks += batch * blocks_b + head * blocks_h + block * blocks_n
    count = tl.load(counts + batch * counts_b + head * counts_h + block)
    held = load_rows(query, s[:, None], query_s, column[None, :], length, SIZE, COLUMNS, SIZE)
    sums = tl.zeros([QUERIES, VALUE_COLUMNS], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    whole = tl.maximum(count - 1, 0)
    sums, total, largest = _walk(
        sums, total, largest, held, s, key, value, key_t, value_t, blocks, 0, whole, key_length, scale, column, value_column,
        CAUSAL, tl.constexpr(False), SIZE, VALUE_SIZE, COLUMNS, VALUE_COLUMNS, BLOCK, KEYS, PRECISION,
    )  # fmt: skip
    sums, total, largest = _walk(
        sums, total, largest, held, s, key, value, key_t, value_t, blocks, whole, count, key_length, scale, column, value_column,
        CAUSAL, tl.constexpr(True), SIZE, VALUE_SIZE, COLUMNS, VALUE_COLUMNS, BLOCK, KEYS, PRECISION,
    )  # fmt: skip

    # Queries that attend to nothing: out and log_sum_exp are 0.
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    where = out + batch * out_b + head * out_h + s[:, None] * out_s + value_column[None, :]
    tl.store(where, result, mask=(s < length)[:, None] & (value_column < VALUE_SIZE)[None, :])
    logarithm = tl.where(nothing, 0.0, (largest + tl.log2(total)) / LOG2_E)
    tl.store(log_sum_exp + (batch * length + s) * heads + head, logarithm, mask=s < length)


def forward(query: Tensor, key: Tensor, value: Tensor, layout: Tensor, **options: Unpack[BlockOptions]) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, E], log_sum_exp [B, H, S], float32); both lie in memory as [B, S, H, …]."""
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    batch, heads, length, size = query.shape
    key_length, value_size = value.shape[2:]
    out = query.new_empty((batch, length, heads, value_size)).transpose(1, 2)
    log_sum_exp = query.new_empty((batch, length, heads), dtype=torch.float32).transpose(1, 2)
    columns, value_columns = block_of(size), block_of(value_size)
    require_addressable(query, key, value, out)
    lists = listed(layout, batch, heads, options["is_causal"])
    is_partial = size != columns or value_size != value_columns
    tiles = forward_tiles(query, max(columns, value_columns), is_partial, options["block_size"])
    launch(
        block_sparse_forward, (triton.cdiv(length, tiles.queries), batch * heads),
        query, key, value, *lists, out, log_sum_exp, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *lists.strides(),
        *out.stride()[:3], heads, heads // key.shape[1], length, key_length, options["scale"],
        CAUSAL=options["is_causal"], SIZE=size, VALUE_SIZE=value_size, COLUMNS=columns, VALUE_COLUMNS=value_columns,
        BLOCK=options["block_size"], QUERIES=tiles.queries, KEYS=tiles.keys, PRECISION=precision_of(query),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out, log_sum_exp
