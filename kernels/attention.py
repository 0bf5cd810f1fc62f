"""Attention as one op of ours, the same on every device, with its backward as a second one.

    out         = (softmax(mask(cap(scale · Q Kᵀ))) ∘ kept) V, a row that attends to nothing being 0
    log_sum_exp = log Σ exp of the same scores; 0 in a row that attends to nothing, as torch's

`attention_reference.py` has the formulas of the backward. The gradient of a mask is an op of its own, called only where the mask wants
one. Both results have gradients: of log_sum_exp models make sinks, and ring attention its sums.

Shapes: query [B, H, S, D], key [B, G, T, D], value [B, G, T, E]; H is a multiple of G, and query head h reads head h // (H / G).
`mask` broadcasts to [B, H, S, T]: bool (true = attend) or a float that is added. `query_documents` [B, S] and `key_documents` [B, T]
are ids, integers, of the documents that were packed into one sequence (B may be 1, for all samples): s attends to t only where they are
equal. Both are given or neither; no order is asked of ids, but the GPU's kernels leave out most where each document lies in one piece.
Causal means that position s attends to t ≤ s, also where S and T differ.
`soft_cap` makes scores cap · tanh(scores / cap) before the mask (Gemma 2); 0.0 is none. `window` lets position s attend to t only
where s − window < t and t < s + window; 0 is none.

Dropout multiplies the probabilities by kept = keep_scale · (drawn(drop_rows, drop_second, drop_columns) < keep_below), with the draws of
`dropout.py`: no mask of the scores' size is written, read or held for the backward. `drop_rows` and `drop_second` broadcast to
[B, H, S, 1], `drop_columns` is [T], all int64, rows + columns below 2³³; keep_below is from 1 to 2³². Without dropout keep_below is 0, the
three are None and kept is 1. The three None and a keep_below are a dropout that is traced but not drawn yet: it does not run.
`implementation` is what a GPU runs: "triton", our own, or "aten", torch's where it serves. They give the same, and take each other's
results.

`log_sum_exp` [B, H, S] is float64 for float64 inputs and float32 otherwise.
Results lie in memory as [B, S, H, D] ([B, S, H]): what follows attention merges the heads, which is then free.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from autopar.kernels.attention_checks import require_drawn, require_fit
from autopar.kernels.attention_masks import Masks, Options
from autopar.kernels.attention_reference import (
    attended,
    attention_backward_reference,
    attention_mask_gradient_reference,
    attention_reference,
    heads_inside,
    lost_rows,
)
from autopar.kernels.attention_rule import backward_rule, forward_rule, mask_gradient_rule
from autopar.kernels.registration import DECOMPOSITIONS, OpTraits, accumulation_dtype, register_op, runs_attention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _attention(query: Tensor, key: Tensor, value: Tensor, *masking: Tensor | None, **options: Unpack[Options]) -> tuple[Tensor, Tensor]:
    masks = Masks(*masking, **options)
    require_drawn(masks)
    if _runs_aten(query, key, value, masks):
        from autopar.kernels.gpu import attention_aten

        return attention_aten.forward(query, key, value, masks)
    if runs_attention(query, value):
        from autopar.kernels.gpu import attention as gpu

        return gpu.forward(query, key, value, masks)
    if not _has_flash(query, value, masks):
        return attention_reference(query, key, value, masks)
    query, key, value = _rows_contiguous(query), _rows_contiguous(key), _rows_contiguous(value)
    additive = _additive(query, key, masks)
    out, log_sum_exp = _flash(query, key, value, 0.0, masks.is_causal, attn_mask=additive, scale=masks.scale)
    return heads_inside(out), heads_inside(log_sum_exp)


# `operands` of both backwards are query, key, value, what masks, and the forward's results.
def _attention_backward(
    grad_out: Tensor, grad_log_sum_exp: Tensor | None, *operands: Any, **options: Unpack[Options]
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *masking, out, log_sum_exp = operands
    masks = Masks(*masking, **options)
    require_drawn(masks)
    if grad_log_sum_exp is None and _runs_aten(query, key, value, masks):
        from autopar.kernels.gpu import attention_aten

        return attention_aten.backward(grad_out, query, key, value, out, log_sum_exp, masks)
    if runs_attention(query, value):
        from autopar.kernels.gpu import attention_backward as gpu

        return gpu.backward(grad_out, grad_log_sum_exp, query, key, value, out, log_sum_exp, masks)
    # torch's fused CPU kernel takes no gradient of log_sum_exp.
    if grad_log_sum_exp is not None or not _has_flash(query, value, masks) or _reaches_lost_rows(grad_out, log_sum_exp, masks):
        return attention_backward_reference(grad_out, grad_log_sum_exp, query, key, value, out, log_sum_exp, masks)
    grad_out, query, key, value, out = (_rows_contiguous(item) for item in (grad_out, query, key, value, out))
    additive = _additive(query, key, masks)
    dropout, is_causal, scale = 0.0, masks.is_causal, masks.scale
    grads = _flash_backward(grad_out, query, key, value, out, log_sum_exp, dropout, is_causal, attn_mask=additive, scale=scale)
    return heads_inside(grads[0]), heads_inside(grads[1]), heads_inside(grads[2])


def _attention_mask_gradient(grad_out: Tensor, grad_log_sum_exp: Tensor | None, *operands: Any, **options: Unpack[Options]) -> Tensor:
    query, key, value, *masking, out, log_sum_exp = operands
    masks = Masks(*masking, **options)
    require_drawn(masks)
    if not runs_attention(query, value):
        return attention_mask_gradient_reference(grad_out, grad_log_sum_exp, query, key, value, out, log_sum_exp, masks)
    from autopar.kernels.gpu import attention_mask_gradient as gpu

    return gpu.mask_gradient(grad_out, grad_log_sum_exp, query, key, value, out, log_sum_exp, masks)


def attention_decomposition(
    query: Tensor, key: Tensor, value: Tensor, *masking: Tensor | None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """torch's fused CPU kernel where it serves, so that what comes before and behind it is fused; else the op."""
    serves = _has_flash(query, value, Masks(*masking, **options))
    return (_attention if serves else attention)(query, key, value, *masking, **options)


def attention_backward_decomposition(
    grad_out: Tensor, grad_log_sum_exp: Tensor | None, *operands: Any, **options: Unpack[Options]
) -> tuple[Tensor, Tensor, Tensor]:
    """As of the forward. Of an added mask the op looks at its rows' values."""
    query, _, value, *masking, _, _ = operands
    masks = Masks(*masking, **options)
    serves = grad_log_sum_exp is None and _has_flash(query, value, masks) and not masks.is_added
    return (_attention_backward if serves else attention_backward)(grad_out, grad_log_sum_exp, *operands, **options)


def _runs_aten(query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> bool:
    """Whether torch's GPU kernel is asked for, and serves."""
    if masks.implementation != "aten" or not query.is_cuda:
        return False
    from autopar.kernels.gpu import attention_aten

    return attention_aten.serves(query, key, value, masks)


def _has_flash(query: Tensor, value: Tensor, masks: Masks) -> bool:
    """Whether torch's fused CPU kernel serves: it knows no dropout of ours, no soft cap and one head size only."""
    return query.device.type == "cpu" and not masks.drops and not masks.soft_cap and query.shape[-1] == value.shape[-1]


def _reaches_lost_rows(grad_out: Tensor, log_sum_exp: Tensor, masks: Masks) -> bool:
    """Whether a gradient reaches a row that an added mask masks wholly: torch's fused CPU kernel weighs each key 1 there, not 1 / n."""
    lost = lost_rows(log_sum_exp, masks)
    return lost is not None and bool((grad_out != 0).any(-1)[lost].any())


def _rows_contiguous(value: Tensor) -> Tensor:
    """The fused CPU kernel takes the last stride for 1 without looking, and is silently wrong where it is not."""
    return value if value.stride(-1) == 1 else value.contiguous()


def _additive(query: Tensor, key: Tensor, masks: Masks) -> Tensor | None:
    """Mask, window and documents as the fused CPU kernel wants them.

    That is with four dims, added, and in the query's dtype or float32 (others are garbage).
    """
    dtype, mask, inside = query.dtype, masks.mask, masks.same_document()
    if masks.window:
        near = attended(query.shape[2], key.shape[2], False, masks.window, query.device)
        inside = near if inside is None else inside & near
    if mask is None or mask.dtype == torch.bool:
        inside = mask if inside is None else inside if mask is None else mask & inside
        return None if inside is None else torch.zeros(_four(inside).shape, dtype=dtype).masked_fill_(~_four(inside), -torch.inf)
    wider = torch.promote_types(mask.dtype, dtype)
    added = _four(mask).to(torch.float32 if dtype != torch.float64 and wider == torch.float32 else dtype)
    return added if inside is None else added.masked_fill(~inside, -torch.inf)


def _four(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, *masking: Tensor | None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    require_fit(query, key, value, Masks(*masking, **options))
    batch, num_heads, length, _ = query.shape
    out = query.new_empty((batch, length, num_heads, value.shape[-1])).transpose(1, 2)
    return out, query.new_empty((batch, length, num_heads), dtype=accumulation_dtype(query)).transpose(1, 2)


def _attention_backward_fake(
    grad_out: Tensor, grad_log_sum_exp: Tensor | None, *operands: Any, **options: Unpack[Options]
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *masking, _, _ = operands
    require_fit(query, key, value, Masks(*masking, **options))
    grad_query, grad_key, grad_value = (
        item.new_empty((item.shape[0], item.shape[2], item.shape[1], item.shape[3])).transpose(1, 2) for item in (query, key, value)
    )
    return grad_query, grad_key, grad_value


def _attention_mask_gradient_fake(grad_out: Tensor, grad_log_sum_exp: Tensor | None, *operands: Any, **options: Unpack[Options]) -> Tensor:
    query, mask = operands[0], operands[3]
    return mask.new_empty(mask.shape, dtype=accumulation_dtype(query))


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    # Nearly always log_sum_exp has no gradient: its zeros would cost the fused backward.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_log_sum_exp: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    mask, out = saved[3], saved[-2]
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grads = torch.ops.autopar.attention_backward(grad_out, grad_log_sum_exp, *saved, **ctx.options)
    grad_mask = None
    if ctx.needs_input_grad[3]:
        grad_mask = torch.ops.autopar.attention_mask_gradient(grad_out, grad_log_sum_exp, *saved, **ctx.options).to(mask.dtype)
    return *grads, grad_mask, None, None, None, None, None


_GRADIENTS, _INPUTS = "Tensor grad_out, Tensor? grad_log_sum_exp", "Tensor query, Tensor key, Tensor value"
_MASKING = "Tensor? query_documents, Tensor? key_documents, Tensor? drop_rows, Tensor? drop_second, Tensor? drop_columns"
_RESULTS = "Tensor out, Tensor log_sum_exp"
_OPTIONS = "*, bool is_causal, float scale, float soft_cap, int window, int keep_below, float keep_scale, str implementation"
register_op(
    "attention",
    f"({_INPUTS}, Tensor? mask, {_MASKING}, {_OPTIONS}) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    OpTraits(forward_rule),
)
register_op(
    "attention_backward",
    f"({_GRADIENTS}, {_INPUTS}, Tensor? mask, {_MASKING}, {_RESULTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
    OpTraits(backward_rule),
)
register_op(
    "attention_mask_gradient",
    f"({_GRADIENTS}, {_INPUTS}, Tensor mask, {_MASKING}, {_RESULTS}, {_OPTIONS}) -> Tensor",
    _attention_mask_gradient,
    _attention_mask_gradient_fake,
    OpTraits(mask_gradient_rule),
)
torch.library.register_autograd("autopar::attention", _differentiate, setup_context=_save)

attention = torch.ops.autopar.attention.default
attention_backward = torch.ops.autopar.attention_backward.default
attention_mask_gradient = torch.ops.autopar.attention_mask_gradient.default
DECOMPOSITIONS[attention], DECOMPOSITIONS[attention_backward] = attention_decomposition, attention_backward_decomposition
