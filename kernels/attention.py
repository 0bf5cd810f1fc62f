"""Attention as one op of ours, the same on every device, with its backward as a second one.

    P      = softmax(scale · Q Kᵀ + mask), a row that attends to nothing being 0
    out    = (P ∘ keep) V
    dV     = (P ∘ keep)ᵀ dO        dP = (dO Vᵀ) ∘ keep
    dS     = P ∘ (dP − rowsum(dO ∘ out))                     rowsum(P ∘ dP) = rowsum(dO ∘ out), with keep too
    dQ, dK = scale · dS K, scale · dSᵀ Q                     (Dao et al., FlashAttention, 2022, appendix B)
    dmask  = dS, summed to the mask's shape: an op of its own, called only where the mask wants a gradient

Shapes: query [B, H, S, D], key [B, G, T, D], value [B, G, T, E]; H is a multiple of G, and query head h reads head h // (H / G).
`mask` broadcasts to [B, H, S, T]: bool (true = attend) or a float that is added. `keep` [B, H, S, T] multiplies the
probabilities: 0 or 1 / (1 − p). Causal means that position s attends to t ≤ s, also where S and T differ.
`log_sum_exp` [B, H, S] is float64 for float64 inputs and float32 otherwise; 0 in a row that attends to nothing, as torch's.
Results lie in memory as [B, S, H, D] ([B, S, H]): what follows attention merges the heads, which is then free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.registration import accumulation_dtype, register_op, runs_triton

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention_reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, keep: Tensor | None = None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log_sum_exp) in plain ops, computed in float32 (float64 for float64)."""
    scores = _scores(query, key, mask, is_causal, scale)
    largest = scores.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    total = (scores - largest).exp_().sum(-1, keepdim=True)
    log_sum_exp = torch.where(total == 0, 0.0, largest + total.log())
    probabilities = (scores - log_sum_exp).exp_()
    if keep is not None:
        probabilities = probabilities * keep
    out = _split_groups(_merge_groups(probabilities, value.shape[1]) @ value.to(scores.dtype), query.shape[1])
    return _heads_inside(out.to(query.dtype)), _heads_inside(log_sum_exp).squeeze(-1)


def attention_backward_reference(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad of query, key, value) in plain ops, computed in float32 (float64 for float64)."""
    num_heads, num_groups = query.shape[1], key.shape[1]
    scores = _scores(query, key, mask, is_causal, scale)
    exact = scores.dtype
    probabilities = (scores - log_sum_exp.unsqueeze(-1)).exp_()
    kept = probabilities if keep is None else probabilities * keep
    grad_value = _merge_groups(kept, num_groups).mT @ _merge_groups(grad_out.to(exact), num_groups)
    grad_scores = _merge_groups(_grad_scores(grad_out, probabilities, value, keep, out) * scale, num_groups)
    grad_query = _split_groups(grad_scores @ key.to(exact), num_heads)
    grad_key = grad_scores.mT @ _merge_groups(query.to(exact), num_groups)
    return (
        _heads_inside(grad_query.to(query.dtype)),
        _heads_inside(grad_key.to(key.dtype)),
        _heads_inside(grad_value.to(value.dtype)),
    )


def attention_mask_gradient_reference(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    keep: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """The gradient of an added mask, of its shape, float32 (float64 for float64), in plain ops."""
    probabilities = (_scores(query, key, mask, is_causal, scale) - log_sum_exp.unsqueeze(-1)).exp_()
    return _grad_scores(grad_out, probabilities, value, keep, out).sum_to_size(mask.shape).contiguous()


def _grad_scores(grad_out: Tensor, probabilities: Tensor, value: Tensor, keep: Tensor | None, out: Tensor) -> Tensor:
    """dS [B, H, S, T] of the formulas above."""
    grad = grad_out.to(probabilities.dtype)
    merged = _merge_groups(grad, value.shape[1]) @ value.to(grad.dtype).mT
    grad_probabilities = _split_groups(merged, grad.shape[1])
    if keep is not None:
        grad_probabilities = grad_probabilities * keep
    row_sum = (grad * out.to(grad.dtype)).sum(-1, keepdim=True)
    return probabilities * (grad_probabilities - row_sum)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """[B, H, S, T], −inf where a position does not attend."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    merged = _merge_groups(query.to(exact), key.shape[1])
    scores = _split_groups(merged @ key.to(exact).mT, query.shape[1]) * scale
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(exact)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _merge_groups(value: Tensor, num_groups: int) -> Tensor:
    """[B, H, S, …] → [B, G, H/G · S, …]: the query heads of one key head stand below each other."""
    batch, num_heads, length = value.shape[:3]
    return value.reshape(batch, num_groups, num_heads // num_groups * length, *value.shape[3:])


def _split_groups(value: Tensor, num_heads: int) -> Tensor:
    batch, num_groups, rows = value.shape[:3]
    return value.reshape(batch, num_heads, rows * num_groups // num_heads, *value.shape[3:])


def _heads_inside(value: Tensor) -> Tensor:
    """The same value, laid out in memory as [B, S, H, …]; copied only where it is not. Strides of dims of size 1 are set too."""
    inside = value.transpose(1, 2)
    return inside.reshape(-1).view(inside.shape).transpose(1, 2)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor | None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if _has_triton(query, value):
        from autopar.kernels.gpu import attention as gpu

        return gpu.forward(query, key, value, gpu.Masks(mask, keep, is_causal, scale))
    if not _has_flash(query, value, keep):
        return attention_reference(query, key, value, mask, keep, is_causal=is_causal, scale=scale)
    query, key, value = _rows_contiguous(query), _rows_contiguous(key), _rows_contiguous(value)
    out, log_sum_exp = _flash(query, key, value, 0.0, is_causal, attn_mask=_additive(mask, query.dtype), scale=scale)
    return _heads_inside(out), _heads_inside(log_sum_exp)


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_triton(query, value):
        from autopar.kernels.gpu import attention_backward as gpu

        masks = gpu.Masks(mask, keep, is_causal, scale)
        return gpu.backward(grad_out, query, key, value, out, log_sum_exp, masks)[:3]
    if not _has_flash(query, value, keep):
        return attention_backward_reference(grad_out, query, key, value, mask, keep, out, log_sum_exp, is_causal=is_causal, scale=scale)
    grad_out, query, key, value, out = (_rows_contiguous(item) for item in (grad_out, query, key, value, out))
    additive = _additive(mask, query.dtype)
    grads = _flash_backward(grad_out, query, key, value, out, log_sum_exp, 0.0, is_causal, attn_mask=additive, scale=scale)
    return _heads_inside(grads[0]), _heads_inside(grads[1]), _heads_inside(grads[2])


def _attention_mask_gradient(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    keep: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor:
    arguments = (grad_out, query, key, value, mask, keep, out, log_sum_exp)
    if not _has_triton(query, value):
        return attention_mask_gradient_reference(*arguments, is_causal=is_causal, scale=scale)
    from autopar.kernels.gpu import attention_backward as gpu

    return gpu.mask_gradient(grad_out, query, key, value, out, log_sum_exp, gpu.Masks(mask, keep, is_causal, scale))


def _has_triton(query: Tensor, value: Tensor) -> bool:
    """Whether our own GPU kernels serve: their tiles hold heads of at most 256, in float32 64."""
    most = 64 if query.dtype == torch.float32 else 256
    return runs_triton(query) and query.dtype == value.dtype and max(query.shape[-1], value.shape[-1]) <= most


def _has_flash(query: Tensor, value: Tensor, keep: Tensor | None) -> bool:
    """Whether torch's fused CPU kernel serves: it knows no `keep` and one head size only."""
    return query.device.type == "cpu" and keep is None and query.shape[-1] == value.shape[-1]


def _rows_contiguous(value: Tensor) -> Tensor:
    """The fused CPU kernel takes the last stride for 1 without looking, and is silently wrong where it is not."""
    return value if value.stride(-1) == 1 else value.contiguous()


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as the fused CPU kernel wants it: four dims, added, and in `dtype` or float32 (it reads others as garbage)."""
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    wider = torch.promote_types(mask.dtype, dtype)
    return mask.to(torch.float32 if dtype != torch.float64 and wider == torch.float32 else dtype)


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor | None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _require_shapes(query, key, value, mask, keep)
    batch, num_heads, length, _ = query.shape
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((batch, length, num_heads, value.shape[-1])).transpose(1, 2)
    return out, query.new_empty((batch, length, num_heads), dtype=exact).transpose(1, 2)


def _attention_backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _require_shapes(query, key, value, mask, keep)
    grad_query, grad_key, grad_value = (
        item.new_empty((item.shape[0], item.shape[2], item.shape[1], item.shape[3])).transpose(1, 2) for item in (query, key, value)
    )
    return grad_query, grad_key, grad_value


def _attention_mask_gradient_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    keep: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor:
    return mask.new_empty(mask.shape, dtype=accumulation_dtype(query))


def _require_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor | None) -> None:
    batch, num_heads, length, head_size = query.shape
    fits = key.shape[0] == batch and key.shape[3] == head_size and value.shape[:3] == key.shape[:3] and num_heads % key.shape[1] == 0
    if not fits:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"attention takes [B, H, S, D], [B, G, T, D], [B, G, T, E] with H a multiple of G; got {shapes}")
    scores = (batch, num_heads, length, key.shape[2])
    if mask is not None and not _broadcasts(mask.shape, scores):
        raise ValueError(f"an attention mask {tuple(mask.shape)} does not broadcast to {scores}")
    if keep is not None and tuple(keep.shape) != scores:
        raise ValueError(f"attention's keep is {tuple(keep.shape)}, not {scores}")


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(size in (1, whole) for size, whole in zip(reversed(shape), reversed(to), strict=False))


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, keep = inputs
    out, log_sum_exp = output
    ctx.mark_non_differentiable(log_sum_exp)
    ctx.save_for_backward(query, key, value, mask, keep, out, log_sum_exp)
    ctx.options = keyword_only_inputs


def _differentiate(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grads = torch.ops.autopar.attention_backward(grad_out, *ctx.saved_tensors, **ctx.options)
    if not ctx.needs_input_grad[3]:
        return *grads, None, None
    grad_mask = torch.ops.autopar.attention_mask_gradient(grad_out, *ctx.saved_tensors, **ctx.options)
    return *grads, grad_mask.to(ctx.saved_tensors[3].dtype), None


_OPTIONS = "*, bool is_causal, float scale"
register_op(
    "attention",
    f"(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? keep, {_OPTIONS}) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
register_op(
    "attention_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? keep, Tensor out, Tensor log_sum_exp, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
)
register_op(
    "attention_mask_gradient",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? keep, Tensor out, Tensor log_sum_exp, "
    f"{_OPTIONS}) -> Tensor",
    _attention_mask_gradient,
    _attention_mask_gradient_fake,
)
torch.library.register_autograd("autopar::attention", _differentiate, setup_context=_save)

attention = torch.ops.autopar.attention.default
attention_backward = torch.ops.autopar.attention_backward.default
attention_mask_gradient = torch.ops.autopar.attention_mask_gradient.default
