"""The default configurations of our kernels: calls, on tensors without storage, that between them launch every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.attention_masks import Draws, Masks
from autopar.kernels.gpu import (
    attention,
    attention_backward,
    attention_gradients,
    attention_mask_gradient,
    block_sparse,
    block_sparse_backward,
    cross_entropy,
    dropout,
    gated,
    normalisation,
    rotary,
    softmax,
)

MATMUL_KERNELS = {
    "attention_forward",
    "for_keys",
    "for_queries",
    "for_mask",
    "row_bases",
    "block_sparse_forward",
    "block_sparse_keys",
    "block_sparse_queries",
}
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """One call of modules of `autopar/kernels/gpu`. Tiles of float32 and of heads of 256 are too small for wgmma and tcgen05."""

    modules: tuple[ModuleType, ...]
    call: Callable[[], object]
    older_matrix_instructions: bool = False


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def softmax_cases() -> dict[str, Case]:
    def both(columns: int, dtype: torch.dtype, mask: Tensor | None) -> Case:
        def call() -> None:
            x = empty(8, 64, columns, dtype=dtype)
            softmax.backward(x, softmax.forward(x, mask, scale=0.5, dtype=dtype), scale=0.5, dtype=dtype)

        return Case((softmax,), call)

    cases = {f"softmax {columns} {dtype}": both(columns, dtype, None) for columns in (77, 1024, 8192, 131072) for dtype in (BF16, FP32)}
    cases |= {f"softmax {softmax.MOST_COLUMNS_HELD} {dtype}": both(softmax.MOST_COLUMNS_HELD, dtype, None) for dtype in (BF16, FP32)}
    for name, dtype in (("bool", torch.bool), ("added", BF16)):
        cases |= {f"softmax {columns} {name} mask": both(columns, BF16, empty(64, columns, dtype=dtype)) for columns in (1024, 131072)}
    return cases


def norm_cases() -> dict[str, Case]:
    def both(columns: int, dtype: torch.dtype, centred: bool, residual: bool) -> Case:
        def call() -> None:
            x, weight = empty(8, 512, columns, dtype=dtype), empty(columns, dtype=dtype)
            bias, residue = weight if centred else None, x if residual else None
            out, total, *rows = normalisation.forward(x, residue, weight, bias, eps=1e-5, centred=centred)
            normalisation.backward(out, residue, total, *rows, weight, centred=centred, has_bias=centred)

        return Case((normalisation,), call)

    sizes = (96, 1024, normalisation.MOST_COLUMNS_BACKWARD, normalisation.MOST_COLUMNS_FORWARD, 131072)
    return {
        f"{'layer' if centred else 'rms'} norm {columns} {dtype}{' of a sum' if residual else ''}": both(columns, dtype, centred, residual)
        for columns in sizes
        for dtype, centred, residual in ((BF16, False, True), (BF16, True, True), (FP32, True, True), (BF16, False, False))
    }


def cross_entropy_cases() -> dict[str, Case]:
    def both(columns: int, dtype: torch.dtype, is_smooth: bool) -> Case:
        def call() -> None:
            logits, index, num_classes = empty(512, columns, dtype=dtype), empty(512, dtype=torch.int64), empty(dtype=torch.int64)
            log_sum_exp, picked, total = cross_entropy.forward(logits, index, num_classes)
            cross_entropy.backward(log_sum_exp, picked, total if is_smooth else None, logits, index, log_sum_exp)

        return Case((cross_entropy,), call)

    sizes = [(1000, BF16, False), (128256, BF16, False), (128256, FP32, False), (50257, BF16, True)]
    return {
        f"cross entropy {columns} {dtype}{' smooth' if is_smooth else ''}": both(columns, dtype, is_smooth)
        for columns, dtype, is_smooth in sizes
    }


def pointwise_cases() -> dict[str, Case]:
    def activations(activation: str) -> Case:
        def call() -> None:
            x, bias = empty(4096, 14336), empty(14336)
            gated.gated_backward(gated.gated(x, x, activation=activation), x, x, activation=activation)
            gated.bias_activation_backward(gated.bias_activation(x, bias, activation=activation), x, bias, activation=activation)

        return Case((gated,), call)

    def turned(size: int, rotated: int, interleaved: bool) -> Case:
        def call() -> None:
            x, angles = empty(2, 1024, 8, size).transpose(1, 2), empty(1024, rotated, dtype=FP32)
            for backward in (False, True):
                rotary.rotate(x, angles, angles, interleaved=interleaved, backward=backward)

        return Case((rotary,), call)

    def dropped(columns: int, dtype: torch.dtype, added: torch.dtype | None, out: torch.dtype, rows_differ: bool = False) -> Case:
        def call() -> None:
            x, residual = empty(8, 512, columns, dtype=dtype), None if added is None else empty(8, 512, columns, dtype=added)
            starts, places = empty(8, 512, 1, dtype=torch.int64), empty(columns, dtype=torch.int64)
            word = empty(8, 1, 1, dtype=torch.int64) if rows_differ else empty(dtype=torch.int64)
            dropout.dropout(x, residual, starts, word, places, keep_below=round(0.9 * 2**32), scale=1 / 0.9, dtype=out)

        return Case((dropout,), call)

    cases = {f"activation {name}": activations(name) for name in gated.ACTIVATIONS}
    cases |= {f"dropout and residual {columns}": dropped(columns, BF16, BF16, BF16) for columns in (64, 768, 5120)}
    cases |= {f"dropout {columns}": dropped(columns, BF16, None, BF16) for columns in (64, 768, 5120)}
    cases["dropout and residual, unequal dtypes"] = dropped(768, BF16, FP32, FP32)
    cases["dropout, unequal dtypes"] = dropped(768, FP32, None, BF16)
    cases["dropout and residual, words of rows"] = dropped(768, FP32, FP32, FP32, rows_differ=True)
    sizes = [(128, 128, False), (64, 32, False), (64, 64, True)]
    return cases | {f"rotary {size} {rotated} {interleaved}": turned(size, rotated, interleaved) for size, rotated, interleaved in sizes}


def attention_cases() -> dict[str, Case]:
    def both(size: int, dtype: torch.dtype, masks: Masks, num_groups: int = 4) -> Case:
        def call() -> None:
            query, key = (empty(2, 2048, heads, size, dtype=dtype).transpose(1, 2) for heads in (8, num_groups))
            out, log_sum_exp = attention.forward(query, key, key, masks)
            backward = attention_backward.backward if masks.mask is None or masks.mask.dtype == torch.bool else every_gradient
            backward(out, log_sum_exp, query, key, key, out, log_sum_exp, masks)

        return Case(
            (attention, attention_gradients, attention_backward, attention_mask_gradient),
            call,
            older_matrix_instructions=dtype == FP32 or size == 256,
        )

    def every_gradient(*arguments: Any) -> None:
        attention_backward.backward(*arguments)
        attention_mask_gradient.mask_gradient(*arguments)

    causal, full = Masks(is_causal=True, scale=0.1), Masks(is_causal=False, scale=0.1)
    ids, places = empty(2, 2048, dtype=torch.int64), empty(2, 8, 2048, 1, dtype=torch.int64)
    packed, packed_causal = (replace(each, query_documents=ids, key_documents=ids) for each in (full, causal))
    added, flags = empty(1, 8, 2048, 2048), empty(2, 1, 2048, 2048, dtype=torch.bool)

    def dropped(masks: Masks, rows_differ: bool = False) -> Masks:
        draws: Draws = places, places if rows_differ else empty(dtype=torch.int64), empty(2048, dtype=torch.int64)
        rows, second, columns = draws
        some = {"keep_below": round(0.9 * 2**32), "keep_scale": 1 / 0.9}
        return replace(masks, drop_rows=rows, drop_second=second, drop_columns=columns, **some)  # type: ignore[arg-type]

    plain = {
        "attention 64 causal": both(64, BF16, causal),
        "attention 128 causal": both(128, BF16, causal),
        "attention 256 causal": both(256, BF16, causal),
        "attention 64 causal float32": both(64, FP32, causal),
        "attention 16 full": both(16, BF16, full, 8),
        "attention 80 full": both(80, BF16, full),
        "attention 128 window and soft-cap": both(128, BF16, replace(causal, window=512, soft_cap=30.0)),
        "attention 64 causal window": both(64, BF16, replace(causal, window=128)),
        "attention 128 window": both(128, BF16, replace(full, window=512)),
        "attention 256 window": both(256, BF16, replace(causal, window=4096)),
        "attention 256 bool mask": both(256, BF16, replace(full, mask=flags)),
        "attention 256 soft-cap": both(256, BF16, replace(causal, soft_cap=50.0)),
        "attention 256 window and soft-cap": both(256, BF16, replace(causal, window=4096, soft_cap=50.0)),
        "attention 64 added mask and soft-cap": both(64, BF16, replace(full, mask=added, soft_cap=50.0)),
        "attention 64 added mask": both(64, BF16, replace(full, mask=added)),
    }
    documents = {
        "attention 64 documents": both(64, BF16, packed),
        "attention 64 causal documents": both(64, BF16, packed_causal),
        "attention 64 causal documents float32": both(64, FP32, packed_causal),
        "attention 128 causal documents": both(128, BF16, packed_causal),
        "attention 256 causal documents": both(256, BF16, packed_causal),
        "attention 256 documents and window": both(256, BF16, replace(packed_causal, window=4096)),
        "attention 64 documents and bool mask": both(64, BF16, replace(packed_causal, mask=flags)),
        "attention 64 documents and bool mask float32": both(64, FP32, replace(packed_causal, mask=flags)),
        "attention 128 documents and added mask": both(128, BF16, replace(packed, mask=added)),
        "attention 128 documents and soft-cap": both(128, BF16, replace(packed_causal, soft_cap=30.0)),
        "attention 256 documents and bool mask": both(256, BF16, replace(packed_causal, mask=flags)),
    }
    dropout = {
        "attention 64 dropout": both(64, BF16, dropped(full), 8),
        "attention 64 causal dropout": both(64, BF16, dropped(causal)),
        "attention 64 causal dropout float32": both(64, FP32, dropped(causal)),
        "attention 64 causal dropout, words of rows": both(64, BF16, dropped(causal, rows_differ=True)),
        "attention 64 dropout and added mask float32": both(64, FP32, dropped(replace(full, mask=added))),
        "attention 80 dropout": both(80, BF16, dropped(full)),
        "attention 80 dropout and bool mask": both(80, BF16, dropped(replace(full, mask=flags))),
        "attention 128 causal dropout": both(128, BF16, dropped(causal)),
        "attention 128 causal dropout, words of rows": both(128, BF16, dropped(causal, rows_differ=True)),
        "attention 256 causal dropout": both(256, BF16, dropped(causal)),
        "attention 256 causal dropout, words of rows": both(256, BF16, dropped(causal, rows_differ=True)),
        "attention 128 dropout, window and soft-cap": both(128, BF16, dropped(replace(causal, window=512, soft_cap=30.0))),
    }
    for size in (64, 128, 256):
        dropout[f"attention {size} dropout and bool mask"] = both(size, BF16, dropped(replace(full, mask=flags)))
        dropout[f"attention {size} causal dropout and bool mask"] = both(size, BF16, dropped(replace(causal, mask=flags)))
        dropout[f"attention {size} dropout and added mask"] = both(size, BF16, dropped(replace(full, mask=added)))
        dropout[f"attention {size} dropout and documents"] = both(size, BF16, dropped(packed_causal))
    return plain | documents | dropout


def block_sparse_cases() -> dict[str, Case]:
    def both(size: int, block_size: int, is_causal: bool, dtype: torch.dtype = BF16) -> Case:
        def call() -> None:
            query, key = (empty(2, 2048, heads, size, dtype=dtype).transpose(1, 2) for heads in (8, 4))
            layout = empty(8, 2048 // block_size, 2048 // block_size, dtype=torch.bool)
            out, log_sum_exp = block_sparse.forward(query, key, key, layout, block_size=block_size, is_causal=is_causal, scale=0.1)
            arguments = (out, log_sum_exp, query, key, key, layout, out, log_sum_exp)
            block_sparse_backward.backward(*arguments, block_size=block_size, is_causal=is_causal, scale=0.1)

        is_small = dtype == FP32 or size == 256 or block_size < 64
        return Case((block_sparse, block_sparse_backward), call, older_matrix_instructions=is_small)

    sizes = [(64, 16, True), (64, 64, True), (64, 128, False), (80, 32, True), (80, 128, False), (128, 16, False), (128, 32, False)]
    sizes += [(128, 64, True), (128, 64, False), (128, 128, True), (256, 16, False), (256, 64, True), (256, 128, False)]
    cases = {
        f"block-sparse {size} in blocks of {block_size}{' causal' if is_causal else ''}": both(size, block_size, is_causal)
        for size, block_size, is_causal in sizes
    }
    return cases | {f"block-sparse 64 in blocks of {block_size} float32": both(64, block_size, True, FP32) for block_size in (16, 64)}


CASES: dict[str, Case] = (
    softmax_cases() | norm_cases() | cross_entropy_cases() | pointwise_cases() | attention_cases() | block_sparse_cases()
)
