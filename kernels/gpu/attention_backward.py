"""Triton kernels of `autopar::attention_backward`, after FlashAttention-2: see `autopar/kernels/attention_reference.py` for the formulas.

    row_sums     rowsum(dO ∘ out), less the gradient of log_sum_exp, one block of queries a program
    for_keys     dK and dV of a block of keys: walks over the queries, of all heads that read this key head, that attend to it
    for_queries  dQ of a block of queries: walks over the keys that it attends to
    for_mask     the gradient of an added mask: one tile of it a program, which walks over the batch and heads that share it

Every result is summed by one program in a fixed order: no atomics, so repetitions are equal.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.gpu.attention_scores import (
    LOG2_E,
    Masks,
    block_of,
    capped,
    load_rows,
    masked,
    precision_of,
    rows_contiguous,
    strides_of,
)
from autopar.kernels.gpu.attention_tiles import Tiles, keys_tiles, queries_tiles
from autopar.kernels.registration import launch


@triton.jit
def row_sums(
    grad_out, out, grad_sum, result, grad_b, grad_h, grad_s, out_b, out_h, out_s, heads, length,
    GRAD_SUM: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    s = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    column = tl.arange(0, BLOCK_VALUE)
    grad_out += batch * grad_b + head * grad_h
    out += batch * out_b + head * out_h
    arrives = load_rows(grad_out, s[:, None], grad_s, column[None, :], length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
    held = load_rows(out, s[:, None], out_s, column[None, :], length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
    total = tl.sum(arrives.to(tl.float32) * held.to(tl.float32), 1)
    rows = (batch * length + s) * heads + head
    if GRAD_SUM:
        total -= tl.load(grad_sum + rows, mask=s < length, other=0.0)
    tl.store(result + rows, total, mask=s < length)


@triton.jit
def _gradients(
    products, grad_probability, s, t, log_sum_exp, row_sum, mask, mask_s, mask_t, keep, keep_s, keep_t,
    length, key_length, window, scale, soft_cap,
    MASK: tl.constexpr, KEEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """(probabilities times keep, gradient of the masked scores, its factor for QKᵀ) of a tile, from QKᵀ and dO Vᵀ."""
    score = capped(products, scale, soft_cap, SOFT_CAP)
    factor = scale
    if SOFT_CAP:
        ratio = score / soft_cap
        factor = scale * (1.0 - ratio * ratio)
    score = masked(score, s, t, mask, mask_s, mask_t, length, key_length, window, MASK, CAUSAL, WINDOW, CAUSAL or WINDOW)
    probability = tl.exp2(score - log_sum_exp * LOG2_E)
    kept = probability
    if KEEP:
        inside = (s < length) & (t < key_length)
        kept_scale = tl.load(keep + s * keep_s + t * keep_t, mask=inside, other=0.0).to(tl.float32)
        kept = probability * kept_scale
        grad_probability *= kept_scale
    return kept, probability * (grad_probability - row_sum), factor


@triton.jit
def for_keys(
    query, key, value, mask, keep, grad_out, log_sum_exp, row_sum, grad_key, grad_value,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, mask_b, mask_h, mask_s, mask_t,
    keep_b, keep_h, keep_s, keep_t, grad_b, grad_h, grad_s, heads, heads_per_key, length, key_length, window, scale, soft_cap,
    MASK: tl.constexpr, KEEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_groups = heads // heads_per_key
    batch, group = (tl.program_id(1) // num_groups).to(tl.int64), (tl.program_id(1) % num_groups).to(tl.int64)
    start_key = tl.program_id(0) * BLOCK_KEYS
    t = start_key + tl.arange(0, BLOCK_KEYS)
    column, value_column = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_VALUE)
    key += batch * key_b + group * key_h
    value += batch * value_b + group * value_h
    held_key = load_rows(key, t[:, None], key_t, column[None, :], key_length, SIZE, BLOCK_SIZE, SIZE)
    held_value = load_rows(value, t[:, None], value_t, value_column[None, :], key_length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
    sum_key = tl.zeros([BLOCK_KEYS, BLOCK_SIZE], tl.float32)
    sum_value = tl.zeros([BLOCK_KEYS, BLOCK_VALUE], tl.float32)
    first, last = 0, length
    if CAUSAL:
        first = start_key // BLOCK_QUERIES * BLOCK_QUERIES
    if WINDOW:
        first = tl.maximum(first, tl.maximum(0, start_key - window + 1) // BLOCK_QUERIES * BLOCK_QUERIES)
        last = tl.minimum(length, start_key + BLOCK_KEYS + window - 1)
    for member in range(0, heads_per_key):
        head = group * heads_per_key + member
        query_head = query + batch * query_b + head * query_h
        grad_head = grad_out + batch * grad_b + head * grad_h
        mask_head = mask + batch * mask_b + head * mask_h
        keep_head = keep + batch * keep_b + head * keep_h
        for start in range(first, last, BLOCK_QUERIES):
            s = start + tl.arange(0, BLOCK_QUERIES)
            rows = (batch * length + s) * heads + head
            normaliser = tl.load(log_sum_exp + rows, mask=s < length, other=0.0)[None, :]
            mean = tl.load(row_sum + rows, mask=s < length, other=0.0)[None, :]
            query_tile = load_rows(query_head, s[:, None], query_s, column[None, :], length, SIZE, BLOCK_SIZE, SIZE)
            arrives = load_rows(grad_head, s[:, None], grad_s, value_column[None, :], length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
            # Tiles are [keys, queries]: what is summed over the queries then needs no transpose.
            products = tl.dot(held_key, tl.trans(query_tile), input_precision=PRECISION)
            grad_probability = tl.dot(held_value, tl.trans(arrives), input_precision=PRECISION)
            kept, grad_score, factor = _gradients(
                products, grad_probability, s[None, :], t[:, None], normaliser, mean, mask_head, mask_s, mask_t, keep_head, keep_s, keep_t,
                length, key_length, window, scale, soft_cap, MASK, KEEP, CAUSAL, WINDOW, SOFT_CAP,
            )  # fmt: skip
            sum_value = tl.dot(kept.to(arrives.dtype), arrives, sum_value, input_precision=PRECISION)
            sum_key = tl.dot((grad_score * factor).to(query_tile.dtype), query_tile, sum_key, input_precision=PRECISION)
    rows = ((batch * key_length + t) * num_groups + group)[:, None]
    inside = (t < key_length)[:, None]
    where = grad_key + rows * SIZE + column[None, :]
    tl.store(where, sum_key.to(grad_key.dtype.element_ty), mask=inside & (column < SIZE)[None, :])
    where = grad_value + rows * VALUE_SIZE + value_column[None, :]
    tl.store(where, sum_value.to(grad_value.dtype.element_ty), mask=inside & (value_column < VALUE_SIZE)[None, :])


@triton.jit
def for_queries(
    query, key, value, mask, keep, grad_out, log_sum_exp, row_sum, grad_query,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, mask_b, mask_h, mask_s, mask_t,
    keep_b, keep_h, keep_s, keep_t, grad_b, grad_h, grad_s, heads, heads_per_key, length, key_length, window, scale, soft_cap,
    MASK: tl.constexpr, KEEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    s = block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    column, value_column = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_VALUE)
    query += batch * query_b + head * query_h
    key += batch * key_b + head // heads_per_key * key_h
    value += batch * value_b + head // heads_per_key * value_h
    grad_out += batch * grad_b + head * grad_h
    mask += batch * mask_b + head * mask_h
    keep += batch * keep_b + head * keep_h
    held = load_rows(query, s[:, None], query_s, column[None, :], length, SIZE, BLOCK_SIZE, SIZE)
    arrives = load_rows(grad_out, s[:, None], grad_s, value_column[None, :], length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
    rows = (batch * length + s) * heads + head
    normaliser = tl.load(log_sum_exp + rows, mask=s < length, other=0.0)[:, None]
    mean = tl.load(row_sum + rows, mask=s < length, other=0.0)[:, None]
    total = tl.zeros([BLOCK_QUERIES, BLOCK_SIZE], tl.float32)
    first, last = 0, key_length
    if CAUSAL:
        last = tl.minimum(key_length, (block + 1) * BLOCK_QUERIES)
    if WINDOW:
        first = tl.maximum(0, block * BLOCK_QUERIES - window + 1) // BLOCK_KEYS * BLOCK_KEYS
        last = tl.minimum(last, (block + 1) * BLOCK_QUERIES + window - 1)
    for start in range(first, last, BLOCK_KEYS):
        t = start + tl.arange(0, BLOCK_KEYS)
        key_tile = load_rows(key, t[:, None], key_t, column[None, :], key_length, SIZE, BLOCK_SIZE, SIZE)
        value_tile = load_rows(value, t[:, None], value_t, value_column[None, :], key_length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
        products = tl.dot(held, tl.trans(key_tile), input_precision=PRECISION)
        grad_probability = tl.dot(arrives, tl.trans(value_tile), input_precision=PRECISION)
        _, grad_score, factor = _gradients(
            products, grad_probability, s[:, None], t[None, :], normaliser, mean, mask, mask_s, mask_t, keep, keep_s, keep_t,
            length, key_length, window, scale, soft_cap, MASK, KEEP, CAUSAL, WINDOW, SOFT_CAP,
        )  # fmt: skip
        total = tl.dot((grad_score * factor).to(key_tile.dtype), key_tile, total, input_precision=PRECISION)
    where = grad_query + rows[:, None] * SIZE + column[None, :]
    tl.store(where, total.to(grad_query.dtype.element_ty), mask=(s < length)[:, None] & (column < SIZE)[None, :])


@triton.jit
def for_mask(
    query, key, value, mask, keep, grad_out, log_sum_exp, row_sum, grad_mask,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, mask_b, mask_h, mask_s, mask_t,
    keep_b, keep_h, keep_s, keep_t, grad_b, grad_h, grad_s, heads, heads_per_key, length, key_length, window, scale, soft_cap,
    batches_shared, heads_shared, own_heads,
    MASK: tl.constexpr, KEEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    t = tl.program_id(1) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    own_batch, own_head = (tl.program_id(2) // own_heads).to(tl.int64), (tl.program_id(2) % own_heads).to(tl.int64)
    column, value_column = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_VALUE)
    total = tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32)
    # A mask of its own for each batch (or head) is shared by one; a broadcast one by all of them.
    for shared in range(0, batches_shared * heads_shared):
        batch, head = own_batch + shared // heads_shared, own_head + shared % heads_shared
        query_head, grad_head = query + batch * query_b + head * query_h, grad_out + batch * grad_b + head * grad_h
        key_head = key + batch * key_b + head // heads_per_key * key_h
        value_head = value + batch * value_b + head // heads_per_key * value_h
        query_tile = load_rows(query_head, s[:, None], query_s, column[None, :], length, SIZE, BLOCK_SIZE, SIZE)
        arrives = load_rows(grad_head, s[:, None], grad_s, value_column[None, :], length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
        key_tile = load_rows(key_head, t[:, None], key_t, column[None, :], key_length, SIZE, BLOCK_SIZE, SIZE)
        value_tile = load_rows(value_head, t[:, None], value_t, value_column[None, :], key_length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
        rows = (batch * length + s) * heads + head
        normaliser = tl.load(log_sum_exp + rows, mask=s < length, other=0.0)[:, None]
        mean = tl.load(row_sum + rows, mask=s < length, other=0.0)[:, None]
        _, grad_score, _ = _gradients(
            tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION),
            tl.dot(arrives, tl.trans(value_tile), input_precision=PRECISION),
            s[:, None], t[None, :], normaliser, mean, mask + batch * mask_b + head * mask_h, mask_s, mask_t,
            keep + batch * keep_b + head * keep_h, keep_s, keep_t, length, key_length, window, scale, soft_cap,
            MASK, KEEP, CAUSAL, WINDOW, SOFT_CAP,
        )  # fmt: skip
        total += grad_score
    where = grad_mask + ((own_batch * own_heads + own_head) * length + s[:, None]) * key_length + t[None, :]
    tl.store(where, total, mask=(s < length)[:, None] & (t < key_length)[None, :])


def backward(
    grad_out: Tensor,
    grad_log_sum_exp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    masks: Masks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, lying in memory as [B, S, H, …]."""
    tensors, numbers, constants = _prepared(grad_out, grad_log_sum_exp, query, key, value, out, log_sum_exp, masks)
    query, key, value = tensors[:3]
    grad_query, grad_key, grad_value = (
        item.new_empty((item.shape[0], item.shape[2], item.shape[1], item.shape[3])).transpose(1, 2) for item in (query, key, value)
    )
    block_size, crowding = max(constants["BLOCK_SIZE"], constants["BLOCK_VALUE"]), masks.crowding(query.shape[-1], value.shape[-1])
    tiles = keys_tiles(query, block_size, crowding)
    grid = (triton.cdiv(key.shape[2], tiles.keys), key.shape[0] * key.shape[1])
    launch(for_keys, grid, *tensors, grad_key, grad_value, *numbers, **constants, **_options(tiles))
    tiles = queries_tiles(query, block_size, crowding)
    grid = (triton.cdiv(query.shape[2], tiles.queries), query.shape[0] * query.shape[1])
    launch(for_queries, grid, *tensors, grad_query, *numbers, **constants, **_options(tiles))
    return grad_query, grad_key, grad_value


def mask_gradient(
    grad_out: Tensor,
    grad_log_sum_exp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    masks: Masks,
) -> Tensor:
    """The gradient of an added mask, of its shape, float32."""
    assert masks.mask is not None
    tensors, numbers, constants = _prepared(grad_out, grad_log_sum_exp, query, key, value, out, log_sum_exp, masks)
    batch, heads, length, _ = query.shape
    own_batch, own_heads = ((1,) * (4 - masks.mask.dim()) + masks.mask.shape)[:2]
    result = query.new_empty((own_batch, own_heads, length, key.shape[2]), dtype=torch.float32)
    tiles = queries_tiles(query, max(constants["BLOCK_SIZE"], constants["BLOCK_VALUE"]), crowding=1)
    grid = (triton.cdiv(length, tiles.queries), triton.cdiv(key.shape[2], tiles.keys), own_batch * own_heads)
    shared = (batch // own_batch, heads // own_heads, own_heads)
    launch(for_mask, grid, *tensors, result, *numbers, *shared, **constants, **_options(tiles))
    return result.sum_to_size(masks.mask.shape)


def _prepared(
    grad_out: Tensor,
    grad_log_sum_exp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    masks: Masks,
) -> tuple[tuple[Tensor, ...], tuple[float, ...], dict[str, Any]]:
    """What all three kernels take: tensors with the row sums, strides and other numbers, constants."""
    grad_out, query, key, value, out = (rows_contiguous(item) for item in (grad_out, query, key, value, out))
    batch, heads, length, size = query.shape
    key_length, value_size = value.shape[2:]
    log_sum_exp = _heads_inside(log_sum_exp)
    row_sum = torch.empty_like(log_sum_exp)
    has_grad_sum = grad_log_sum_exp is not None
    grad_sum = row_sum if grad_log_sum_exp is None else _heads_inside(grad_log_sum_exp)
    launch(
        row_sums, (triton.cdiv(length, 16), batch * heads), grad_out, out, grad_sum, row_sum, *grad_out.stride()[:3], *out.stride()[:3],
        heads, length, GRAD_SUM=has_grad_sum, VALUE_SIZE=value_size, BLOCK_VALUE=block_of(value_size), BLOCK_QUERIES=16, num_warps=4,
    )  # fmt: skip
    mask = None if masks.mask is None else masks.mask.expand(batch, heads, length, key_length)
    held = (query if mask is None else mask, query if masks.keep is None else masks.keep)
    numbers = (
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides_of(mask), *strides_of(masks.keep), *grad_out.stride()[:3],
        heads, heads // key.shape[1], length, key_length, masks.window, masks.scale, masks.soft_cap,
    )  # fmt: skip
    constants = {"SIZE": size, "VALUE_SIZE": value_size, "BLOCK_SIZE": block_of(size), "BLOCK_VALUE": block_of(value_size)}
    constants |= {**masks.flags(), "PRECISION": precision_of(query)}
    return (query, key, value, *held, grad_out, log_sum_exp, row_sum), numbers, constants


def _heads_inside(rows: Tensor) -> Tensor:
    """A number a row, [B, H, S], in memory as the kernels index it: [B, S, H]."""
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


def _options(tiles: Tiles) -> dict[str, int]:
    return {
        "BLOCK_QUERIES": tiles.queries,
        "BLOCK_KEYS": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
