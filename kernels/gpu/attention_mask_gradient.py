"""Triton kernel of `autopar::attention_mask_gradient`: the gradient of an added mask.

A program holds one tile of it, and walks over the batch and the heads that share it, in a fixed order.
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.attention_masks import Masks
from autopar.kernels.gpu.attention_gradients import gradients, load_bases, options_of, prepared
from autopar.kernels.gpu.attention_masks import crowding
from autopar.kernels.gpu.attention_scores import load_ids, load_products, load_rows, load_words
from autopar.kernels.gpu.attention_tiles import queries_tiles
from autopar.kernels.registration import launch


@triton.jit
def for_mask(
    query, key, value, mask, query_documents, key_documents, rows, second, columns, grad_out, log_sum_exp, excess, row_sum, grad_mask,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, mask_b, mask_h, mask_s, mask_t,
    query_documents_b, key_documents_b, rows_b, rows_h, rows_s, second_b, second_h, second_s, grad_b, grad_h, grad_s,
    heads, heads_per_key, length, key_length, window, scale, soft_cap, keep_scale,
    batches_shared, heads_shared, own_heads,
    MASK: tl.constexpr, DROPS: tl.constexpr, LARGEST_KEPT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DOCUMENTS: tl.constexpr,
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
        document_s = load_ids(query_documents + batch * query_documents_b, s, length, DOCUMENTS)
        document_t = load_ids(key_documents + batch * key_documents_b, t, key_length, DOCUMENTS)
        row = load_products(rows + batch * rows_b + head * rows_h, s, rows_s, length, DROPS)
        word = load_words(second + batch * second_b + head * second_h, s, second_s, length, DROPS)
        place = load_products(columns, t, 1, key_length, DROPS)
        numbers = (batch * length + s) * heads + head
        base, beyond = load_bases(log_sum_exp, excess, numbers, s < length, MASK)
        base, beyond = base[:, None], beyond[:, None]
        mean = tl.load(row_sum + numbers, mask=s < length, other=0.0)[:, None]
        _, grad_score, _ = gradients(
            tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION),
            tl.dot(arrives, tl.trans(value_tile), input_precision=PRECISION),
            s[:, None], t[None, :], document_s[:, None], document_t[None, :], row[:, None], word[:, None], place[None, :],
            base, beyond, mean,
            mask + batch * mask_b + head * mask_h, mask_s, mask_t, length, key_length, window, scale, soft_cap, keep_scale,
            MASK, DROPS, LARGEST_KEPT, CAUSAL, WINDOW, SOFT_CAP, DOCUMENTS,
        )  # fmt: skip
        total += grad_score
    where = grad_mask + ((own_batch * own_heads + own_head) * length + s[:, None]) * key_length + t[None, :]
    tl.store(where, total, mask=(s < length)[:, None] & (t < key_length)[None, :])


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
    tensors, numbers, constants = prepared(grad_out, grad_log_sum_exp, query, key, value, out, log_sum_exp, masks)
    batch, heads, length, _ = query.shape
    own_batch, own_heads = ((1,) * (4 - masks.mask.dim()) + masks.mask.shape)[:2]
    result = query.new_empty((own_batch, own_heads, length, key.shape[2]), dtype=torch.float32)
    crowd = crowding(masks, query.shape[-1], value.shape[-1])
    tiles = queries_tiles(query, max(constants["BLOCK_SIZE"], constants["BLOCK_VALUE"]), crowd)
    grid = (triton.cdiv(length, tiles.queries), triton.cdiv(key.shape[2], tiles.keys), own_batch * own_heads)
    shared = (batch // own_batch, heads // own_heads, own_heads)
    launch(for_mask, grid, *tensors, result, *numbers, *shared, **constants, **options_of(tiles))
    return result.sum_to_size(masks.mask.shape)
