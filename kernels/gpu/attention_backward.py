"""Triton kernels of `autopar::attention_backward`, after FlashAttention-2: see `autopar/kernels/attention_reference.py` for the formulas.

    for_keys     dK and dV of a block of keys: walks over the queries, of all heads that read this key head, that attend to it
    for_queries  dQ of a block of queries: walks over the keys that it attends to

Every result is summed by one program in a fixed order: no atomics, so repetitions are equal.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.attention_masks import Masks
from autopar.kernels.gpu.attention_gradients import gradients, load_bases, options_of, prepared
from autopar.kernels.gpu.attention_masks import bounds, crowding
from autopar.kernels.gpu.attention_scores import load_ids, load_products, load_rows, load_words
from autopar.kernels.gpu.attention_tiles import keys_tiles, queries_tiles
from autopar.kernels.registration import launch


@triton.jit
def for_keys(
    query, key, value, mask, query_documents, key_documents, rows, second, columns, grad_out, log_sum_exp, excess, row_sum,
    bounds, grad_key, grad_value,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, mask_b, mask_h, mask_s, mask_t,
    query_documents_b, key_documents_b, rows_b, rows_h, rows_s, second_b, second_h, second_s, grad_b, grad_h, grad_s,
    heads, heads_per_key, length, key_length, window, scale, soft_cap, keep_scale, bounds_b,
    MASK: tl.constexpr, DROPS: tl.constexpr, LARGEST_KEPT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DOCUMENTS: tl.constexpr,
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
    query_documents += batch * query_documents_b
    document_t = load_ids(key_documents + batch * key_documents_b, t, key_length, DOCUMENTS)[:, None]
    place = load_products(columns, t, 1, key_length, DROPS)[:, None]
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
    if DOCUMENTS:
        bounds += batch * bounds_b + tl.program_id(0) * 2
        first = tl.maximum(first, tl.load(bounds))
        last = tl.minimum(last, tl.load(bounds + 1))
    for member in range(0, heads_per_key):
        head = group * heads_per_key + member
        query_head = query + batch * query_b + head * query_h
        grad_head = grad_out + batch * grad_b + head * grad_h
        mask_head = mask + batch * mask_b + head * mask_h
        rows_head, word_head = rows + batch * rows_b + head * rows_h, second + batch * second_b + head * second_h
        for start in range(first, last, BLOCK_QUERIES):
            s = start + tl.arange(0, BLOCK_QUERIES)
            document_s = load_ids(query_documents, s, length, DOCUMENTS)[None, :]
            row = load_products(rows_head, s, rows_s, length, DROPS)[None, :]
            word = load_words(word_head, s, second_s, length, DROPS)[None, :]
            numbers = (batch * length + s) * heads + head
            base, beyond = load_bases(log_sum_exp, excess, numbers, s < length, MASK)
            base, beyond = base[None, :], beyond[None, :]
            mean = tl.load(row_sum + numbers, mask=s < length, other=0.0)[None, :]
            query_tile = load_rows(query_head, s[:, None], query_s, column[None, :], length, SIZE, BLOCK_SIZE, SIZE)
            arrives = load_rows(grad_head, s[:, None], grad_s, value_column[None, :], length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
            # Tiles are [keys, queries]: what is summed over the queries then needs no transpose.
            products = tl.dot(held_key, tl.trans(query_tile), input_precision=PRECISION)
            grad_probability = tl.dot(held_value, tl.trans(arrives), input_precision=PRECISION)
            dropped, grad_score, factor = gradients(
                products, grad_probability, s[None, :], t[:, None], document_s, document_t, row, word, place, base, beyond, mean,
                mask_head, mask_s, mask_t, length, key_length, window, scale, soft_cap, keep_scale,
                MASK, DROPS, LARGEST_KEPT, CAUSAL, WINDOW, SOFT_CAP, DOCUMENTS,
            )  # fmt: skip
            sum_value = tl.dot(dropped.to(arrives.dtype), arrives, sum_value, input_precision=PRECISION)
            sum_key = tl.dot((grad_score * factor).to(query_tile.dtype), query_tile, sum_key, input_precision=PRECISION)
    numbers = ((batch * key_length + t) * num_groups + group)[:, None]
    inside = (t < key_length)[:, None]
    where = grad_key + numbers * SIZE + column[None, :]
    tl.store(where, sum_key.to(grad_key.dtype.element_ty), mask=inside & (column < SIZE)[None, :])
    where = grad_value + numbers * VALUE_SIZE + value_column[None, :]
    tl.store(where, sum_value.to(grad_value.dtype.element_ty), mask=inside & (value_column < VALUE_SIZE)[None, :])


@triton.jit
def for_queries(
    query, key, value, mask, query_documents, key_documents, rows, second, columns, grad_out, log_sum_exp, excess, row_sum,
    bounds, grad_query,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, mask_b, mask_h, mask_s, mask_t,
    query_documents_b, key_documents_b, rows_b, rows_h, rows_s, second_b, second_h, second_s, grad_b, grad_h, grad_s,
    heads, heads_per_key, length, key_length, window, scale, soft_cap, keep_scale, bounds_b,
    MASK: tl.constexpr, DROPS: tl.constexpr, LARGEST_KEPT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DOCUMENTS: tl.constexpr,
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
    key_documents += batch * key_documents_b
    document_s = load_ids(query_documents + batch * query_documents_b, s, length, DOCUMENTS)[:, None]
    row = load_products(rows + batch * rows_b + head * rows_h, s, rows_s, length, DROPS)[:, None]
    word = load_words(second + batch * second_b + head * second_h, s, second_s, length, DROPS)[:, None]
    held = load_rows(query, s[:, None], query_s, column[None, :], length, SIZE, BLOCK_SIZE, SIZE)
    arrives = load_rows(grad_out, s[:, None], grad_s, value_column[None, :], length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
    numbers = (batch * length + s) * heads + head
    base, beyond = load_bases(log_sum_exp, excess, numbers, s < length, MASK)
    base, beyond = base[:, None], beyond[:, None]
    mean = tl.load(row_sum + numbers, mask=s < length, other=0.0)[:, None]
    total = tl.zeros([BLOCK_QUERIES, BLOCK_SIZE], tl.float32)
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
    for start in range(first, last, BLOCK_KEYS):
        t = start + tl.arange(0, BLOCK_KEYS)
        key_tile = load_rows(key, t[:, None], key_t, column[None, :], key_length, SIZE, BLOCK_SIZE, SIZE)
        value_tile = load_rows(value, t[:, None], value_t, value_column[None, :], key_length, VALUE_SIZE, BLOCK_VALUE, VALUE_SIZE)
        document_t = load_ids(key_documents, t, key_length, DOCUMENTS)[None, :]
        place = load_products(columns, t, 1, key_length, DROPS)[None, :]
        products = tl.dot(held, tl.trans(key_tile), input_precision=PRECISION)
        grad_probability = tl.dot(arrives, tl.trans(value_tile), input_precision=PRECISION)
        _, grad_score, factor = gradients(
            products, grad_probability, s[:, None], t[None, :], document_s, document_t, row, word, place, base, beyond, mean,
            mask, mask_s, mask_t, length, key_length, window, scale, soft_cap, keep_scale,
            MASK, DROPS, LARGEST_KEPT, CAUSAL, WINDOW, SOFT_CAP, DOCUMENTS,
        )  # fmt: skip
        total = tl.dot((grad_score * factor).to(key_tile.dtype), key_tile, total, input_precision=PRECISION)
    where = grad_query + numbers[:, None] * SIZE + column[None, :]
    tl.store(where, total.to(grad_query.dtype.element_ty), mask=(s < length)[:, None] & (column < SIZE)[None, :])


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
    tensors, numbers, constants = prepared(grad_out, grad_log_sum_exp, query, key, value, out, log_sum_exp, masks)
    query, key, value = tensors[:3]
    grad_query, grad_key, grad_value = (
        item.new_empty((item.shape[0], item.shape[2], item.shape[1], item.shape[3])).transpose(1, 2) for item in (query, key, value)
    )
    block_size, crowd = max(constants["BLOCK_SIZE"], constants["BLOCK_VALUE"]), crowding(masks, query.shape[-1], value.shape[-1])
    tiles = keys_tiles(query, block_size, crowd)
    grid = (triton.cdiv(key.shape[2], tiles.keys), key.shape[0] * key.shape[1])
    starts, stride = bounds(masks, tiles.queries, tiles.keys, query, of_keys=True)
    launch(for_keys, grid, *tensors, starts, grad_key, grad_value, *numbers, stride, **constants, **options_of(tiles))
    tiles = queries_tiles(query, block_size, crowd)
    grid = (triton.cdiv(query.shape[2], tiles.queries), query.shape[0] * query.shape[1])
    starts, stride = bounds(masks, tiles.queries, tiles.keys, query)
    launch(for_queries, grid, *tensors, starts, grad_query, *numbers, stride, **constants, **options_of(tiles))
    return grad_query, grad_key, grad_value
