"""What the kernels of attention's backward share: see `autopar/kernels/attention_reference.py` for the formulas.

row_sums     rowsum(dO ∘ out), less the gradient of log_sum_exp, one block of queries a program
row_bases    what scores are taken from before their exponential: log_sum_exp, and what it lost of rows that an added mask masks wholly
gradients    of the scores of a tile
prepared     what all of them take
"""

# A kernel's parameters get their types at the launch.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.attention_masks import Masks
from autopar.kernels.attention_reference import LOST_BELOW
from autopar.kernels.gpu.attention_masks import ADDED_MASK, constants, operands
from autopar.kernels.gpu.attention_scores import (
    LOG2_E,
    block_of,
    capped,
    kept,
    load_ids,
    load_rows,
    masked,
    precision_of,
    rows_contiguous,
)
from autopar.kernels.gpu.attention_tiles import Tiles
from autopar.kernels.registration import launch

_OF_BASES = ("MASK", "CAUSAL", "WINDOW", "SOFT_CAP", "DOCUMENTS", "SIZE", "BLOCK_SIZE", "PRECISION")


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
def row_bases(
    query, key, mask, query_documents, key_documents, log_sum_exp, bases, excess,
    query_b, query_h, query_s, key_b, key_h, key_t, mask_b, mask_h, mask_s, mask_t, query_documents_b, key_documents_b,
    heads, heads_per_key, length, key_length, window, scale, soft_cap,
    LOST_BELOW: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    DOCUMENTS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """bases + excess / log₂ e is log_sum_exp, kept apart where their sum would lose the excess. Other rows cost no product."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    s = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    rows = (batch * length + s) * heads + head
    known = tl.load(log_sum_exp + rows, mask=s < length, other=0.0)
    is_lost = known < LOST_BELOW
    base, beyond = known, tl.zeros([BLOCK_QUERIES], tl.float32)
    if tl.max(is_lost.to(tl.int32), 0) > 0:  # type: ignore[operator]
        column = tl.arange(0, BLOCK_SIZE)
        query += batch * query_b + head * query_h
        key += batch * key_b + head // heads_per_key * key_h
        mask += batch * mask_b + head * mask_h
        document_s = load_ids(query_documents + batch * query_documents_b, s, length, DOCUMENTS)
        held = load_rows(query, s[:, None], query_s, column[None, :], length, SIZE, BLOCK_SIZE, SIZE)
        largest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_QUERIES], tl.float32)
        for start in range(0, key_length, BLOCK_KEYS):
            t = start + tl.arange(0, BLOCK_KEYS)
            transposed = load_rows(key, t[None, :], key_t, column[:, None], key_length, SIZE, BLOCK_SIZE, SIZE)
            document_t = load_ids(key_documents + batch * key_documents_b, t, key_length, DOCUMENTS)
            score = capped(tl.dot(held, transposed, input_precision=PRECISION), scale, soft_cap, SOFT_CAP)
            score = masked(
                score, s[:, None], t[None, :], document_s[:, None], document_t[None, :], mask, mask_s, mask_t,
                length, key_length, window, MASK, CAUSAL, WINDOW, DOCUMENTS, tl.constexpr(True),
            )  # fmt: skip
            larger = tl.maximum(largest, tl.max(score, 1))
            from_here = tl.where(larger == float("-inf"), 0.0, larger)
            total = total * tl.exp2((largest - from_here) * LOG2_E) + tl.sum(tl.exp2((score - from_here[:, None]) * LOG2_E), 1)
            largest = larger
        base = tl.where(is_lost, largest, base)
        beyond = tl.where(is_lost, tl.log2(total), beyond)
    tl.store(bases + rows, base, mask=s < length)
    tl.store(excess + rows, beyond, mask=s < length)


@triton.jit
def load_bases(log_sum_exp, excess, rows, inside, MASK: tl.constexpr):
    """What scores are taken from; and what of it is apart with an added mask, in units of log 2."""
    base = tl.load(log_sum_exp + rows, mask=inside, other=0.0)
    beyond = base
    if MASK == 2:
        beyond = tl.load(excess + rows, mask=inside, other=0.0)
    return base, beyond


@triton.jit
def gradients(
    products, grad_probability, s, t, document_s, document_t, row, word, place, base, beyond, row_sum, mask, mask_s, mask_t,
    length, key_length, window, scale, soft_cap, keep_scale,
    MASK: tl.constexpr, DROPS: tl.constexpr, LARGEST_KEPT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """(probabilities after dropout, gradient of the masked scores, its factor for QKᵀ) of a tile, from QKᵀ and dO Vᵀ."""
    score = capped(products, scale, soft_cap, SOFT_CAP)
    factor = scale
    if SOFT_CAP:
        ratio = score / soft_cap
        factor = scale * (1.0 - ratio * ratio)
    score = masked(
        score, s, t, document_s, document_t, mask, mask_s, mask_t,
        length, key_length, window, MASK, CAUSAL, WINDOW, DOCUMENTS, CAUSAL or WINDOW or DOCUMENTS,
    )  # fmt: skip
    # Beyond the last key scores are 0, which may be far above the row's: times the 0 of the key itself, but not where it is infinite.
    if MASK == 2:
        probability = tl.exp2(tl.minimum(score - base, 0.0) * LOG2_E - beyond)
    else:
        probability = tl.exp2(tl.minimum(score - base * LOG2_E, 0.0))
    dropped = probability
    if DROPS:
        weight = kept(row, word, place, keep_scale, LARGEST_KEPT)
        dropped = probability * weight
        grad_probability *= weight
    return dropped, probability * (grad_probability - row_sum), factor


def prepared(
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
    held, strides = operands(masks, query, key)
    constant = constants(masks, query)
    sizes = {"SIZE": size, "VALUE_SIZE": value_size, "BLOCK_SIZE": block_of(size), "BLOCK_VALUE": block_of(value_size)}
    compiled_for = {**sizes, **constant, "PRECISION": precision_of(query)}
    excess = log_sum_exp
    if constant["MASK"] == ADDED_MASK:
        bases, excess, block = torch.empty_like(log_sum_exp), torch.empty_like(log_sum_exp), 32 if query.dtype == torch.float32 else 64
        launch(
            row_bases, (triton.cdiv(length, block), batch * heads), query, key, *held[:3], log_sum_exp, bases, excess,
            *query.stride()[:3], *key.stride()[:3], *strides[:6], heads, heads // key.shape[1], length, key_length,
            masks.window, masks.scale, masks.soft_cap, LOST_BELOW=LOST_BELOW, BLOCK_QUERIES=block, BLOCK_KEYS=block, num_warps=4,
            num_stages=1, **{name: compiled_for[name] for name in _OF_BASES},
        )  # fmt: skip
        log_sum_exp = bases
    numbers = (
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides, *grad_out.stride()[:3],
        heads, heads // key.shape[1], length, key_length, masks.window, masks.scale, masks.soft_cap, masks.keep_scale,
    )  # fmt: skip
    return (query, key, value, *held, grad_out, log_sum_exp, excess, row_sum), numbers, compiled_for


def _heads_inside(rows: Tensor) -> Tensor:
    """A number a row, [B, H, S], in memory as the kernels index it: [B, S, H]."""
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


def options_of(tiles: Tiles) -> dict[str, int]:
    """What a launch is told of its tiles."""
    return {
        "BLOCK_QUERIES": tiles.queries,
        "BLOCK_KEYS": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
