"""Attention by torch's own kernels on GPUs, FlashAttention and cuDNN, whichever of the two torch chooses for these operands.

They compute what ours do, where they serve: the same output and log Σ exp, so that either backward suits either forward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from autopar.kernels.attention_masks import Masks
from autopar.kernels.attention_reference import heads_inside

aten = torch.ops.aten

_FUSED = (SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value)


def serves(query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> bool:
    """Whether torch has a fused kernel for these operands on this device, and it is one of the two."""
    return why_not(query, key, value, masks) is None and _choice(query, key, value, masks) in _FUSED


def why_not(query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> str | None:
    """What of the attention torch's fused kernels do not know, by shapes, dtypes and options alone; None where nothing."""
    unknown = {
        "a mask": masks.mask is not None,
        "ids of documents": masks.has_documents,
        "a window": masks.window > 0,
        "a soft cap": masks.soft_cap > 0.0,
        "a dropout by position": masks.drops,
        # FlashAttention lines causal rows up at their end, ours and cuDNN at their start.
        "causal rows of another number than the keys": masks.is_causal and query.shape[2] != key.shape[2],
        f"{query.dtype}": query.dtype not in (torch.float16, torch.bfloat16) or {key.dtype, value.dtype} != {query.dtype},
        "values of another size than the keys": query.shape[3] != value.shape[3],
        f"heads of {query.shape[3]}": query.shape[3] % 8 != 0 or query.shape[3] > 256,
    }
    return next((what for what, there in unknown.items() if there), None)


def forward(query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, D], log_sum_exp [B, H, S], float32); both lie in memory as [B, S, H, …]."""
    if _choice(query, key, value, masks) == SDPBackend.CUDNN_ATTENTION.value:
        found = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, masks.is_causal, False, scale=masks.scale)
        return heads_inside(found[0]), heads_inside(found[1].squeeze(-1))
    found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, masks.is_causal, False, scale=masks.scale)
    return heads_inside(found[0]), heads_inside(found[1])


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, masks: Masks
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, lying in memory as [B, S, H, …]."""
    lengths, is_causal, scale = (query.shape[2], key.shape[2]), masks.is_causal, masks.scale
    # Of a dropout that there is none of.
    seed, offset = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    if _choice(query, key, value, masks) == SDPBackend.CUDNN_ATTENTION.value:
        rows = log_sum_exp.contiguous().unsqueeze(-1)
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, query, key, value, out, rows, seed, offset, None, None, None, *lengths, 0.0, is_causal, scale=scale
        )
    else:
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, log_sum_exp.contiguous(), None, None, *lengths, 0.0, is_causal, seed, offset, scale=scale
        )
    return heads_inside(grads[0]), heads_inside(grads[1]), heads_inside(grads[2])


def _choice(query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> int:
    """What torch's dispatch takes for these operands, an `SDPBackend`: it knows the device, the build and `sdpa_kernel`."""
    is_grouped = query.shape[1] != key.shape[1]
    return aten._fused_sdp_choice(query, key, value, None, 0.0, masks.is_causal, scale=masks.scale, enable_gqa=is_grouped)
