"""Attention and its backward in plain ops, computed in float32 (float64 for float64): what `autopar/kernels/attention.py` means.

scores = scale · Q Kᵀ, and with a soft cap cap · tanh(scores / cap) of them
P      = softmax(scores + mask), a row that attends to nothing being 0
out    = (P ∘ keep) V
dV     = (P ∘ keep)ᵀ dO        dP = (dO Vᵀ) ∘ keep
dS     = P ∘ (dP − rowsum(dO ∘ out) + dL)                rowsum(P ∘ dP) = rowsum(dO ∘ out), with keep too; L is log_sum_exp
dA     = dS ∘ (1 − (capped scores / cap)²)               dS where there is no cap
dQ, dK = scale · dA K, scale · dAᵀ Q                     (Dao et al., FlashAttention, 2022, appendix B)
dmask  = dS, summed to the mask's shape
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from autopar.kernels.registration import accumulation_dtype


class Options(TypedDict):
    """What the attention ops take besides tensors; `autopar/kernels/attention.py` says what each means."""

    is_causal: bool
    scale: float
    soft_cap: float
    window: int


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """(out, log_sum_exp)."""
    scores = _masked(_capped_scores(query, key, options), mask, same_document(query_documents, key_documents), options)
    largest = scores.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    total = (scores - largest).exp_().sum(-1, keepdim=True)
    log_sum_exp = torch.where(total == 0, 0.0, largest + total.log())
    probabilities = (scores - log_sum_exp).exp_()
    if keep is not None:
        probabilities = probabilities * keep
    out = _split_groups(_merge_groups(probabilities, value.shape[1]) @ value.to(scores.dtype), query.shape[1])
    return heads_inside(out.to(query.dtype)), heads_inside(log_sum_exp).squeeze(-1)


def attention_backward_reference(
    grad_out: Tensor,
    grad_log_sum_exp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad of query, key, value)."""
    num_heads, num_groups = query.shape[1], key.shape[1]
    capped = _capped_scores(query, key, options)
    exact = capped.dtype
    same = same_document(query_documents, key_documents)
    probabilities = (_masked(capped, mask, same, options) - log_sum_exp.unsqueeze(-1)).exp_()
    kept = probabilities if keep is None else probabilities * keep
    grad_value = _merge_groups(kept, num_groups).mT @ _merge_groups(grad_out.to(exact), num_groups)
    grad_scores = _grad_scores(grad_out, grad_log_sum_exp, probabilities, value, keep, out) * options["scale"]
    if options["soft_cap"]:
        grad_scores = grad_scores * (1.0 - (capped / options["soft_cap"]).square())
    grad_scores = _merge_groups(grad_scores, num_groups)
    grad_query = _split_groups(grad_scores @ key.to(exact), num_heads)
    grad_key = grad_scores.mT @ _merge_groups(query.to(exact), num_groups)
    return (
        heads_inside(grad_query.to(query.dtype)),
        heads_inside(grad_key.to(key.dtype)),
        heads_inside(grad_value.to(value.dtype)),
    )


def attention_mask_gradient_reference(
    grad_out: Tensor,
    grad_log_sum_exp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    keep: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    **options: Unpack[Options],
) -> Tensor:
    """The gradient of an added mask, of its shape, float32 (float64 for float64)."""
    scores = _masked(_capped_scores(query, key, options), mask, same_document(query_documents, key_documents), options)
    probabilities = (scores - log_sum_exp.unsqueeze(-1)).exp_()
    return _grad_scores(grad_out, grad_log_sum_exp, probabilities, value, keep, out).sum_to_size(mask.shape).contiguous()


def attended(length: int, key_length: int, is_causal: bool, window: int, device: torch.device) -> Tensor:
    """bool [S, T], true where the positions alone let s attend to t."""
    rows, keys = torch.arange(length, device=device)[:, None], torch.arange(key_length, device=device)
    inside = keys <= rows if is_causal else torch.ones((length, key_length), dtype=torch.bool, device=device)
    if window:
        inside = inside & (rows - window < keys) & (keys < rows + window)
    return inside


def same_document(query_documents: Tensor | None, key_documents: Tensor | None) -> Tensor | None:
    """bool [B, 1, S, T], true where s and t belong to one document; None where there are no documents."""
    if query_documents is None or key_documents is None:
        assert query_documents is key_documents, "documents of queries or of keys alone"
        return None
    return (query_documents[:, :, None] == key_documents[:, None, :]).unsqueeze(1)


def heads_inside(value: Tensor) -> Tensor:
    """The same value, laid out in memory as [B, S, H, …]; copied only where it is not. Strides of dims of size 1 are set too."""
    inside = value.transpose(1, 2)
    return inside.reshape(-1).view(inside.shape).transpose(1, 2)


def _grad_scores(
    grad_out: Tensor, grad_log_sum_exp: Tensor | None, probabilities: Tensor, value: Tensor, keep: Tensor | None, out: Tensor
) -> Tensor:
    """dS [B, H, S, T] of the formulas above."""
    grad = grad_out.to(probabilities.dtype)
    merged = _merge_groups(grad, value.shape[1]) @ value.to(grad.dtype).mT
    grad_probabilities = _split_groups(merged, grad.shape[1])
    if keep is not None:
        grad_probabilities = grad_probabilities * keep
    row_sum = (grad * out.to(grad.dtype)).sum(-1, keepdim=True)
    if grad_log_sum_exp is not None:
        row_sum = row_sum - grad_log_sum_exp.unsqueeze(-1)
    return probabilities * (grad_probabilities - row_sum)


def _capped_scores(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """[B, H, S, T] before the mask."""
    exact = accumulation_dtype(query)
    merged = _merge_groups(query.to(exact), key.shape[1])
    scores = _split_groups(merged @ key.to(exact).mT, query.shape[1]) * options["scale"]
    return (scores / options["soft_cap"]).tanh_() * options["soft_cap"] if options["soft_cap"] else scores


def _masked(scores: Tensor, mask: Tensor | None, same: Tensor | None, options: Options) -> Tensor:
    """[B, H, S, T], −inf where a position does not attend; `same` is where two of one document meet."""
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if options["is_causal"] or options["window"]:
        inside = attended(scores.shape[-2], scores.shape[-1], options["is_causal"], options["window"], scores.device)
        scores = scores.masked_fill(~inside, -torch.inf)
    return scores if same is None else scores.masked_fill(~same, -torch.inf)


def _merge_groups(value: Tensor, num_groups: int) -> Tensor:
    """[B, H, S, …] → [B, G, H/G · S, …]: the query heads of one key head stand below each other."""
    batch, num_heads, length = value.shape[:3]
    return value.reshape(batch, num_groups, num_heads // num_groups * length, *value.shape[3:])


def _split_groups(value: Tensor, num_heads: int) -> Tensor:
    batch, num_groups, rows = value.shape[:3]
    return value.reshape(batch, num_heads, rows * num_groups // num_heads, *value.shape[3:])
