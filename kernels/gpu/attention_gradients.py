"""What the kernels of attention's backward share: see `autopar/kernels/attention_reference.py` for the formulas.

row_sums     rowsum(dO ∘ out), less the gradient of log_sum_exp, one block of queries a program
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
from autopar.kernels.gpu.attention_masks import constants, operands
from autopar.kernels.gpu.attention_scores import LOG2_E, block_of, capped, kept, load_rows, masked, precision_of, rows_contiguous
from autopar.kernels.gpu.attention_tiles import Tiles
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
def gradients(
    products, grad_probability, s, t, document_s, document_t, row, word, place, log_sum_exp, row_sum, mask, mask_s, mask_t,
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
    probability = tl.exp2(tl.minimum(score - log_sum_exp * LOG2_E, 0.0))
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
    numbers = (
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides, *grad_out.stride()[:3],
        heads, heads // key.shape[1], length, key_length, masks.window, masks.scale, masks.soft_cap, masks.keep_scale,
    )  # fmt: skip
    sizes = {"SIZE": size, "VALUE_SIZE": value_size, "BLOCK_SIZE": block_of(size), "BLOCK_VALUE": block_of(value_size)}
    compiled_for = {**sizes, **constants(masks, query), "PRECISION": precision_of(query)}
    return (query, key, value, *held, grad_out, log_sum_exp, row_sum), numbers, compiled_for


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
