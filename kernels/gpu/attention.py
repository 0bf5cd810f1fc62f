"""Triton kernel of `autopar::attention`, after FlashAttention-2 (Dao, 2023): see `autopar/kernels/attention.py` for what it computes.

A program holds a block of queries of one head and walks over the keys that they attend to. Where causal, it first walks over
the tiles that all of its queries see, then over those on the diagonal.

Where there are documents, it walks over the tiles between bounds found beforehand (`attention_documents.py`).

           keys →
    queries  ■ ■ ◪ · ·        ■ no predicate      ◪ predicates (EDGE)      · never loaded
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.attention_masks import Masks
from autopar.kernels.gpu.attention_masks import bounds, constants, crowding, operands
from autopar.kernels.gpu.attention_scores import (
    LOG2_E,
    block_of,
    capped,
    kept,
    load_ids,
    load_products,
    load_rows,
    load_words,
    masked,
    precision_of,
    require_addressable,
    rows_contiguous,
)
from autopar.kernels.gpu.attention_tiles import forward_tiles
from autopar.kernels.registration import launch


@triton.jit
def _walk(
    sums, total, largest, query, s, document_s, row, word, key, value, key_documents, columns, key_t, value_t, mask, mask_s, mask_t,
    first, last, length, key_length, window, scale, soft_cap, keep_scale, column, value_column,
    MASK: tl.constexpr, DROPS: tl.constexpr, LARGEST_KEPT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DOCUMENTS: tl.constexpr, EDGE: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys from `first` to `last` into the running sums, totals and maxima of the block's queries."""
    for start in range(first, last, BLOCK_KEYS):
        t = start + tl.arange(0, BLOCK_KEYS)
        transposed = load_rows(key, t[None, :], key_t, column[:, None], key_length, SIZE, BLOCK_SIZE, SIZE)
        score = capped(tl.dot(query, transposed, input_precision=PRECISION), scale, soft_cap, SOFT_CAP)
        document_t = load_ids(key_documents, t, key_length, DOCUMENTS)
        score = masked(
            score, s[:, None], t[None, :], document_s[:, None], document_t[None, :], mask, mask_s, mask_t,
            length, key_length, window, MASK, CAUSAL, WINDOW, DOCUMENTS, EDGE,
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        if MASK == 2:
            power = tl.exp2((score - base[:, None]) * LOG2_E)
            shrink = tl.exp2((largest - base) * LOG2_E)
        else:
            power = tl.exp2(score - base[:, None])
            shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(power, 1)
        if DROPS:
            place = load_products(columns, t, 1, key_length, DROPS)
            power *= kept(row[:, None], word[:, None], place[None, :], keep_scale, LARGEST_KEPT)
        held = load_rows(value, t[:, None], value_t, value_column[None, :], key_length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
        sums = tl.dot(power.to(held.dtype), held, sums * shrink[:, None], input_precision=PRECISION)
        largest = larger
    return sums, total, largest


@triton.jit
def attention_forward(
    query, key, value, mask, query_documents, key_documents, rows, second, columns, bounds, out, log_sum_exp,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, mask_b, mask_h, mask_s, mask_t,
    query_documents_b, key_documents_b, rows_b, rows_h, rows_s, second_b, second_h, second_s, bounds_b, out_b, out_h, out_s,
    heads, heads_per_key, length, key_length, window, scale, soft_cap, keep_scale,
    MASK: tl.constexpr, DROPS: tl.constexpr, LARGEST_KEPT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DOCUMENTS: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The last blocks see the most keys where causal: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    group = head // heads_per_key
    s = block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    column, value_column = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_VALUE)
    query += batch * query_b + head * query_h
    key += batch * key_b + group * key_h
    value += batch * value_b + group * value_h
    mask += batch * mask_b + head * mask_h
    key_documents += batch * key_documents_b
    document_s = load_ids(query_documents + batch * query_documents_b, s, length, DOCUMENTS)
    row = load_products(rows + batch * rows_b + head * rows_h, s, rows_s, length, DROPS)
    word = load_words(second + batch * second_b + head * second_h, s, second_s, length, DROPS)
    held = load_rows(query, s[:, None], query_s, column[None, :], length, SIZE, BLOCK_SIZE, SIZE)
    sums = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE], tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    largest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)

    first, last = 0, key_length
    if CAUSAL:
        last = tl.minimum(key_length, (block + 1) * BLOCK_QUERIES)
    if WINDOW:
        first = tl.maximum(0, block * BLOCK_QUERIES - window + 1) // BLOCK_KEYS * BLOCK_KEYS
        last = tl.minimum(last, (block + 1) * BLOCK_QUERIES + window - 1)
    if DOCUMENTS:
        bounds += batch * bounds_b + block * 2
        first = tl.maximum(first, tl.load(bounds))
        last = tl.minimum(last, tl.load(bounds + 1))
    middle = first
    if not (WINDOW or DOCUMENTS):
        middle = (tl.minimum(key_length, block * BLOCK_QUERIES) if CAUSAL else key_length) // BLOCK_KEYS * BLOCK_KEYS
        sums, total, largest = _walk(
            sums, total, largest, held, s, document_s, row, word, key, value, key_documents, columns, key_t, value_t,
            mask, mask_s, mask_t, first, middle, length, key_length, window, scale, soft_cap, keep_scale, column, value_column,
            MASK, DROPS, LARGEST_KEPT, CAUSAL, WINDOW, SOFT_CAP, DOCUMENTS, tl.constexpr(False),
            SIZE, VALUE_SIZE, BLOCK_SIZE, BLOCK_VALUE, BLOCK_KEYS, PRECISION,
        )  # fmt: skip
    sums, total, largest = _walk(
        sums, total, largest, held, s, document_s, row, word, key, value, key_documents, columns, key_t, value_t,
        mask, mask_s, mask_t, middle, last, length, key_length, window, scale, soft_cap, keep_scale, column, value_column,
        MASK, DROPS, LARGEST_KEPT, CAUSAL, WINDOW, SOFT_CAP, DOCUMENTS, tl.constexpr(True),
        SIZE, VALUE_SIZE, BLOCK_SIZE, BLOCK_VALUE, BLOCK_KEYS, PRECISION,
    )  # fmt: skip

    # A query that attends to nothing: out and log_sum_exp are 0.
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    where = out + batch * out_b + head * out_h + s[:, None] * out_s + value_column[None, :]
    tl.store(where, result, mask=(s < length)[:, None] & (value_column < VALUE_SIZE)[None, :])
    if MASK == 2:
        logarithm = tl.where(nothing, 0.0, largest + tl.log2(total) / LOG2_E)
    else:
        logarithm = tl.where(nothing, 0.0, (largest + tl.log2(total)) / LOG2_E)
    tl.store(log_sum_exp + (batch * length + s) * heads + head, logarithm, mask=s < length)


def forward(query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, E], log_sum_exp [B, H, S], float32); both lie in memory as [B, S, H, …]."""
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    batch, heads, length, size = query.shape
    key_length, value_size = value.shape[2:]
    out = query.new_empty((batch, length, heads, value_size)).transpose(1, 2)
    log_sum_exp = query.new_empty((batch, length, heads), dtype=torch.float32).transpose(1, 2)
    require_addressable(query, key, value, out)
    tiles = forward_tiles(query, max(block_of(size), block_of(value_size)), crowding(masks, size, value_size))
    tensors, strides = operands(masks, query, key)
    starts, starts_stride = bounds(masks, tiles.queries, tiles.keys, query)
    launch(
        attention_forward, (triton.cdiv(length, tiles.queries), batch * heads),
        query, key, value, *tensors, starts, out, log_sum_exp,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides, starts_stride, *out.stride()[:3],
        heads, heads // key.shape[1], length, key_length, masks.window, masks.scale, masks.soft_cap, masks.keep_scale,
        **constants(masks, query), SIZE=size, VALUE_SIZE=value_size, BLOCK_SIZE=block_of(size), BLOCK_VALUE=block_of(value_size),
        BLOCK_QUERIES=tiles.queries, BLOCK_KEYS=tiles.keys, PRECISION=precision_of(query),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out, log_sum_exp
