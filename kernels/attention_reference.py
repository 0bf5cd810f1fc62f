"""Attention and its backward in plain ops, computed in float32 (float64 for float64): what `autopar/kernels/attention.py` means.

scores = scale · Q Kᵀ, and with a soft cap cap · tanh(scores / cap) of them
P      = softmax(scores + mask), a row that attends to nothing being 0
out    = (P ∘ kept) V                                    kept is 0 or keep_scale, by each position's draw; 1 without dropout
dV     = (P ∘ kept)ᵀ dO        dP = (dO Vᵀ) ∘ kept
dS     = P ∘ (dP − rowsum(dO ∘ out) + dL)                rowsum(P ∘ dP) = rowsum(dO ∘ out), with dropout too; L is log_sum_exp
dA     = dS ∘ (1 − (capped scores / cap)²)               dS where there is no cap
dQ, dK = scale · dA K, scale · dAᵀ Q                     (Dao et al., FlashAttention, 2022, appendix B)
dmask  = dS, summed to the mask's shape

The backward makes P again as exp(scores − log_sum_exp). A row in which an added mask gives every key a number such as −1e9 has
log_sum_exp = −1e9 + log n, in which log n is lost: P would be 1 in place of 1 / n. Such rows are known by their log_sum_exp
(`LOST_BELOW`) and are normalised once more, which is why the gradient of a mask does not split keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.attention_masks import Masks
from autopar.kernels.registration import accumulation_dtype

# A log_sum_exp below this has lost digits that probabilities need: half of a unit in its last place is 1.5e-5 in float32.
# Scores alone hardly come so low in all of a row, and have lost as many digits themselves; an added mask is the same number for all.
LOST_BELOW = -256.0


def attention_reference(query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """(out, log_sum_exp)."""
    probabilities, log_sum_exp = _softmax(_masked(_capped_scores(query, key, masks), masks))
    kept = masks.kept(probabilities)
    if kept is not None:
        probabilities = probabilities * kept
    out = _split_groups(_merge_groups(probabilities, value.shape[1]) @ value.to(probabilities.dtype), query.shape[1])
    return heads_inside(out.to(query.dtype)), heads_inside(log_sum_exp).squeeze(-1)


def attention_backward_reference(
    grad_out: Tensor,
    grad_log_sum_exp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    masks: Masks,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad of query, key, value)."""
    num_heads, num_groups = query.shape[1], key.shape[1]
    capped = _capped_scores(query, key, masks)
    exact = capped.dtype
    probabilities = _probabilities(_masked(capped, masks), log_sum_exp, masks)
    kept = masks.kept(probabilities)
    dropped = probabilities if kept is None else probabilities * kept
    grad_value = _merge_groups(dropped, num_groups).mT @ _merge_groups(grad_out.to(exact), num_groups)
    grad_scores = _grad_scores(grad_out, grad_log_sum_exp, probabilities, kept, value, out) * masks.scale
    if masks.soft_cap:
        grad_scores = grad_scores * (1.0 - (capped / masks.soft_cap).square())
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
    out: Tensor,
    log_sum_exp: Tensor,
    masks: Masks,
) -> Tensor:
    """The gradient of an added mask, of its shape, float32 (float64 for float64)."""
    assert masks.mask is not None
    probabilities = _probabilities(_masked(_capped_scores(query, key, masks), masks), log_sum_exp, masks)
    grad_scores = _grad_scores(grad_out, grad_log_sum_exp, probabilities, masks.kept(probabilities), value, out)
    return grad_scores.sum_to_size(masks.mask.shape).contiguous()


def attended(length: int, key_length: int, is_causal: bool, window: int, device: torch.device) -> Tensor:
    """bool [S, T], true where the positions alone let s attend to t."""
    rows, keys = torch.arange(length, device=device)[:, None], torch.arange(key_length, device=device)
    inside = keys <= rows if is_causal else torch.ones((length, key_length), dtype=torch.bool, device=device)
    if window:
        inside = inside & (rows - window < keys) & (keys < rows + window)
    return inside


def lost_rows(log_sum_exp: Tensor, masks: Masks) -> Tensor | None:
    """bool [B, H, S], true in rows whose probabilities log_sum_exp does not give; None where there are none."""
    if not masks.is_added:
        return None
    lost = log_sum_exp < LOST_BELOW
    return lost if bool(lost.any()) else None


def heads_inside(value: Tensor) -> Tensor:
    """The same value, laid out in memory as [B, S, H, …]; copied only where it is not. Strides of dims of size 1 are set too."""
    inside = value.transpose(1, 2)
    if inside.is_contiguous() and 1 not in inside.shape:
        return value
    return inside.reshape(-1).view(inside.shape).transpose(1, 2)


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(probabilities, log Σ exp [..., 1]) of the last dim, both 0 in a row of −inf."""
    largest = scores.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    power = (scores - largest).exp_()
    total = power.sum(-1, keepdim=True)
    log_sum_exp = torch.where(total == 0, 0.0, largest + total.log())
    return power / torch.where(total == 0, 1.0, total), log_sum_exp


def _probabilities(scores: Tensor, log_sum_exp: Tensor, masks: Masks) -> Tensor:
    """P [B, H, S, T] of the formulas above, of masked scores."""
    found = (scores - log_sum_exp.unsqueeze(-1)).exp_()
    lost = lost_rows(log_sum_exp, masks)
    return found if lost is None else torch.where(lost.unsqueeze(-1), _softmax(scores)[0], found)


def _grad_scores(
    grad_out: Tensor, grad_log_sum_exp: Tensor | None, probabilities: Tensor, kept: Tensor | None, value: Tensor, out: Tensor
) -> Tensor:
    """dS [B, H, S, T] of the formulas above."""
    grad = grad_out.to(probabilities.dtype)
    merged = _merge_groups(grad, value.shape[1]) @ value.to(grad.dtype).mT
    grad_probabilities = _split_groups(merged, grad.shape[1])
    if kept is not None:
        grad_probabilities = grad_probabilities * kept
    row_sum = (grad * out.to(grad.dtype)).sum(-1, keepdim=True)
    if grad_log_sum_exp is not None:
        row_sum = row_sum - grad_log_sum_exp.unsqueeze(-1)
    return probabilities * (grad_probabilities - row_sum)


def _capped_scores(query: Tensor, key: Tensor, masks: Masks) -> Tensor:
    """[B, H, S, T] before the mask."""
    exact = accumulation_dtype(query)
    merged = _merge_groups(query.to(exact), key.shape[1])
    scores = _split_groups(merged @ key.to(exact).mT, query.shape[1]) * masks.scale
    return (scores / masks.soft_cap).tanh_() * masks.soft_cap if masks.soft_cap else scores


def _masked(scores: Tensor, masks: Masks) -> Tensor:
    """[B, H, S, T], −inf where a position does not attend."""
    mask, same = masks.mask, masks.same_document()
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if masks.is_causal or masks.window:
        inside = attended(scores.shape[-2], scores.shape[-1], masks.is_causal, masks.window, scores.device)
        scores = scores.masked_fill(~inside, -torch.inf)
    return scores if same is None else scores.masked_fill(~same, -torch.inf)


def _merge_groups(value: Tensor, num_groups: int) -> Tensor:
    """[B, H, S, …] → [B, G, H/G · S, …]: the query heads of one key head stand below each other."""
    batch, num_heads, length = value.shape[:3]
    return value.reshape(batch, num_groups, num_heads // num_groups * length, *value.shape[3:])


def _split_groups(value: Tensor, num_heads: int) -> Tensor:
    batch, num_groups, rows = value.shape[:3]
    return value.reshape(batch, num_heads, rows * num_groups // num_heads, *value.shape[3:])
