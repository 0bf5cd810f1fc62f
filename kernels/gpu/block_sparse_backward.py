"""Triton kernels of `autopar::block_sparse_attention_backward`: `autopar/kernels/block_sparse_reference.py` has the formulas.

    row_sums              dense attention's
    block_sparse_keys     dK and dV of keys of one block: walks over the blocks of queries that attend to it, of all heads that read it
    block_sparse_queries  dQ of queries of one block: walks over the blocks of keys that it attends to

Every result is summed by one program in a fixed order: no atomics, so repetitions are equal.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.block_sparse_reference import BlockOptions
from autopar.kernels.gpu.attention_gradients import row_sums
from autopar.kernels.gpu.attention_scores import LOG2_E, block_of, load_rows, precision_of, rows_contiguous
from autopar.kernels.gpu.attention_tiles import Tiles
from autopar.kernels.gpu.block_sparse import listed
from autopar.kernels.gpu.block_sparse_tiles import keys_tiles, queries_tiles
from autopar.kernels.registration import launch


@triton.jit
def block_sparse_keys(
    query, key, value, grad_out, log_sum_exp, row_sum, blocks, counts, grad_key, grad_value,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, grad_b, grad_h, grad_s,
    blocks_b, blocks_h, blocks_n, counts_b, counts_h, heads, heads_per_key, length, key_length, scale,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = BLOCK // QUERIES
    num_groups = heads // heads_per_key
    batch, group = (tl.program_id(1) // num_groups).to(tl.int64), (tl.program_id(1) % num_groups).to(tl.int64)
    block = tl.program_id(0) * KEYS // BLOCK
    t = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    column, value_column = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    key += batch * key_b + group * key_h
    value += batch * value_b + group * value_h
    held_key = load_rows(key, t[:, None], key_t, column[None, :], key_length, SIZE, COLUMNS, SIZE)
    held_value = load_rows(value, t[:, None], value_t, value_column[None, :], key_length, VALUE_SIZE, VALUE_COLUMNS, VALUE_SIZE)
    sum_key = tl.zeros([KEYS, COLUMNS], tl.float32)
    sum_value = tl.zeros([KEYS, VALUE_COLUMNS], tl.float32)
    for member in range(0, heads_per_key):
        head = group * heads_per_key + member
        query_head = query + batch * query_b + head * query_h
        grad_head = grad_out + batch * grad_b + head * grad_h
        own_blocks = blocks + batch * blocks_b + head * blocks_h + block * blocks_n
        count = tl.load(counts + batch * counts_b + head * counts_h + block)
        for step in range(0, count * STEPS):
            s = tl.load(own_blocks + step // STEPS) * BLOCK + step % STEPS * QUERIES + tl.arange(0, QUERIES)  # type: ignore[operator]
            rows = (batch * length + s) * heads + head
            normaliser = tl.load(log_sum_exp + rows, mask=s < length, other=0.0)[None, :]
            mean = tl.load(row_sum + rows, mask=s < length, other=0.0)[None, :]
            query_tile = load_rows(query_head, s[:, None], query_s, column[None, :], length, SIZE, COLUMNS, SIZE)
            arrives = load_rows(grad_head, s[:, None], grad_s, value_column[None, :], length, VALUE_SIZE, VALUE_COLUMNS, VALUE_SIZE)
            # Tiles are [keys, queries]: what is summed over the queries then needs no transpose. Queries past the end are all zeros,
            # and so is what they add; keys past the end are not stored.
            score = tl.dot(held_key, tl.trans(query_tile), input_precision=PRECISION) * scale
            if CAUSAL:
                score = tl.where(t[:, None] <= s[None, :], score, float("-inf"))
            grad_probability = tl.dot(held_value, tl.trans(arrives), input_precision=PRECISION)
            probability = tl.exp2((score - normaliser) * LOG2_E)
            grad_score = probability * (grad_probability - mean) * scale
            sum_value = tl.dot(probability.to(arrives.dtype), arrives, sum_value, input_precision=PRECISION)
            sum_key = tl.dot(grad_score.to(query_tile.dtype), query_tile, sum_key, input_precision=PRECISION)
    rows = ((batch * key_length + t) * num_groups + group)[:, None]
    inside = (t < key_length)[:, None]
    where = grad_key + rows * SIZE + column[None, :]
    tl.store(where, sum_key.to(grad_key.dtype.element_ty), mask=inside & (column < SIZE)[None, :])
    where = grad_value + rows * VALUE_SIZE + value_column[None, :]
    tl.store(where, sum_value.to(grad_value.dtype.element_ty), mask=inside & (value_column < VALUE_SIZE)[None, :])


@triton.jit
def block_sparse_queries(
    query, key, value, grad_out, log_sum_exp, row_sum, blocks, counts, grad_query,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, grad_b, grad_h, grad_s,
    blocks_b, blocks_h, blocks_n, counts_b, counts_h, heads, heads_per_key, length, key_length, scale,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = BLOCK // KEYS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    block = tile * QUERIES // BLOCK
    s = tile * QUERIES + tl.arange(0, QUERIES)
    column, value_column = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    query += batch * query_b + head * query_h
    key += batch * key_b + head // heads_per_key * key_h
    value += batch * value_b + head // heads_per_key * value_h
    grad_out += batch * grad_b + head * grad_h
    blocks += batch * blocks_b + head * blocks_h + block * blocks_n
    count = tl.load(counts + batch * counts_b + head * counts_h + block)
    held = load_rows(query, s[:, None], query_s, column[None, :], length, SIZE, COLUMNS, SIZE)
    arrives = load_rows(grad_out, s[:, None], grad_s, value_column[None, :], length, VALUE_SIZE, VALUE_COLUMNS, VALUE_SIZE)
    rows = (batch * length + s) * heads + head
    normaliser = tl.load(log_sum_exp + rows, mask=s < length, other=0.0)[:, None]
    mean = tl.load(row_sum + rows, mask=s < length, other=0.0)[:, None]
    total = tl.zeros([QUERIES, COLUMNS], tl.float32)
    for step in range(0, count * STEPS):
        t = tl.load(blocks + step // STEPS) * BLOCK + step % STEPS * KEYS + tl.arange(0, KEYS)  # type: ignore[operator]
        key_tile = load_rows(key, t[:, None], key_t, column[None, :], key_length, SIZE, COLUMNS, SIZE)
        value_tile = load_rows(value, t[:, None], value_t, value_column[None, :], key_length, VALUE_SIZE, VALUE_COLUMNS, VALUE_SIZE)
        score = tl.dot(held, tl.trans(key_tile), input_precision=PRECISION) * scale
        # Past the end a score of 0 may be far above a row's other scores, and its exponential overflow.
        attends = (t < key_length)[None, :]
        if CAUSAL:
            attends = attends & (t[None, :] <= s[:, None])
        score = tl.where(attends, score, float("-inf"))
        grad_probability = tl.dot(arrives, tl.trans(value_tile), input_precision=PRECISION)
        grad_score = tl.exp2((score - normaliser) * LOG2_E) * (grad_probability - mean) * scale
        total = tl.dot(grad_score.to(key_tile.dtype), key_tile, total, input_precision=PRECISION)
    where = grad_query + rows[:, None] * SIZE + column[None, :]
    tl.store(where, total.to(grad_query.dtype.element_ty), mask=(s < length)[:, None] & (column < SIZE)[None, :])


def backward(
    grad_out: Tensor,
    grad_log_sum_exp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    **options: Unpack[BlockOptions],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, lying in memory as [B, S, H, …]."""
    grad_out, query, key, value, out = (rows_contiguous(item) for item in (grad_out, query, key, value, out))
    batch, heads, length, size = query.shape
    num_groups, key_length, value_size = value.shape[1:]
    is_causal, block_size = options["is_causal"], options["block_size"]
    columns, value_columns = block_of(size), block_of(value_size)
    grad_query, grad_key, grad_value = (
        item.new_empty((batch, item.shape[2], item.shape[1], item.shape[3])).transpose(1, 2) for item in (query, key, value)
    )
    log_sum_exp = _heads_inside(log_sum_exp)
    tensors = (query, key, value, grad_out, log_sum_exp, _row_sums(grad_out, grad_log_sum_exp, out, log_sum_exp))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3])
    numbers = (heads, heads // num_groups, length, key_length, options["scale"])
    constants = {"CAUSAL": is_causal, "SIZE": size, "VALUE_SIZE": value_size, "COLUMNS": columns, "VALUE_COLUMNS": value_columns}
    constants |= {"BLOCK": block_size, "PRECISION": precision_of(query)}
    widest, is_partial = max(columns, value_columns), size != columns or value_size != value_columns

    lists = listed(layout, batch, heads, is_causal, of_keys=True)
    tiles = keys_tiles(query, widest, is_partial, block_size)
    grid = (triton.cdiv(key_length, tiles.keys), batch * num_groups)
    arguments = (*tensors, *lists, grad_key, grad_value, *strides, *lists.strides(), *numbers)
    launch(block_sparse_keys, grid, *arguments, **constants, **_options(tiles))

    lists = listed(layout, batch, heads, is_causal)
    tiles = queries_tiles(query, widest, is_partial, block_size)
    grid = (triton.cdiv(length, tiles.queries), batch * heads)
    launch(block_sparse_queries, grid, *tensors, *lists, grad_query, *strides, *lists.strides(), *numbers, **constants, **_options(tiles))
    return grad_query, grad_key, grad_value


def _row_sums(grad_out: Tensor, grad_log_sum_exp: Tensor | None, out: Tensor, log_sum_exp: Tensor) -> Tensor:
    """rowsum(dO ∘ out), less the gradient of log_sum_exp, [B, H, S] float32."""
    batch, heads, length, value_size = out.shape
    row_sum = torch.empty_like(log_sum_exp)
    grad_sum = row_sum if grad_log_sum_exp is None else _heads_inside(grad_log_sum_exp)
    launch(
        row_sums, (triton.cdiv(length, 16), batch * heads), grad_out, out, grad_sum, row_sum, *grad_out.stride()[:3], *out.stride()[:3],
        heads, length, GRAD_SUM=grad_log_sum_exp is not None, VALUE_SIZE=value_size, BLOCK_VALUE=block_of(value_size), BLOCK_QUERIES=16,
        num_warps=4,
    )  # fmt: skip
    return row_sum


def _heads_inside(rows: Tensor) -> Tensor:
    """A number a row, [B, H, S], in memory as the kernels index it: [B, S, H]."""
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


def _options(tiles: Tiles) -> dict[str, int]:
    return {"QUERIES": tiles.queries, "KEYS": tiles.keys, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
