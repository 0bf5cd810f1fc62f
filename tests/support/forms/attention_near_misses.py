"""What looks like attention and is none, or none that the op computes: each with a part of the reason that the pass gives."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.forms.attention import LOWEST, SQUARE, B, D, H, S, T, form, padding, some_empty


def scores_of(m: Any) -> Tensor:
    return m.query @ m.key.transpose(-2, -1) / math.sqrt(D)


@form("mask from the scores", reason="the mask depends on the scores")
def _(m: Any) -> Tensor:
    scores = scores_of(m)
    return scores.masked_fill(scores < 0, -math.inf).softmax(-1) @ m.value


@form("bias from the scores", reason="the mask depends on the scores")
def _(m: Any) -> Tensor:
    product = m.query @ m.key.mT
    return (product / 2 + product.tanh().mean(-2, keepdim=True)).softmax(-1) @ m.value


@form("the largest scores only", reason="the mask depends on the scores")
def _(m: Any) -> Tensor:
    scores = scores_of(m)
    least = scores.topk(3, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf).softmax(-1) @ m.value


@form("softmax over queries", reason="the softmax runs over another dim", **SQUARE)
def _(m: Any) -> Tensor:
    return scores_of(m).softmax(-2) @ m.value


@form("softmax over heads", reason="the softmax runs over another dim")
def _(m: Any) -> Tensor:
    return scores_of(m).softmax(1) @ m.value


@form("values summed over queries", reason="the softmax runs over another dim", **SQUARE)
def _(m: Any) -> Tensor:
    return torch.einsum("bhst,bhsd->bhtd", scores_of(m).softmax(-1), m.value)


@form("sorted probabilities", reason="the probabilities go through a result of an op with several", **SQUARE)
def _(m: Any) -> Tensor:
    return scores_of(m).softmax(-1).sort(-1).values @ m.value


@form("probabilities are an output", reason="the probabilities are used elsewhere too, by an output")
def _(m: Any) -> tuple[Tensor, Tensor]:
    weights = scores_of(m).softmax(-1)
    return weights @ m.value, weights


@form("probabilities read again", reason="the probabilities are used elsewhere too")
def _(m: Any) -> Tensor:
    weights = scores_of(m).softmax(-1)
    return weights @ m.value + weights.square().sum()


@form("scores are an output", reason="the scores are used elsewhere too, by an output")
def _(m: Any) -> tuple[Tensor, Tensor]:
    scores = m.query @ m.key.mT
    return (scores / 2).softmax(-1) @ m.value, scores


@form("two products with values", reason="the probabilities are used elsewhere too")
def _(m: Any) -> Tensor:
    weights = scores_of(m).softmax(-1)
    return weights @ m.value + weights @ m.value.sin()


@form("integer scores", reason="the scores are of torch.int64")
def _(m: Any) -> Tensor:
    scores = m.query.long() @ m.key.mT.long()
    return scores.to(m.value.dtype).softmax(-1) @ m.value


@form("scale by key", reason="the scale varies by key", weight=(T,))
def _(m: Any) -> Tensor:
    return (scores_of(m) * m.weight).softmax(-1) @ m.value


@form("mask by multiplication", reason="the scale varies by key", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    return (scores_of(m) * mask[:, None, None]).softmax(-1) @ m.value


@form("learned temperature after a mask", reason="scaled by a tensor after a mask", temperature=(1,), inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = scores_of(m).masked_fill(~mask[:, None, None], -1e9)
    return (scores / m.temperature).softmax(-1) @ m.value


@form("sigmoid", reason="the weights are sigmoid of the scores")
def _(m: Any) -> Tensor:
    return scores_of(m).sigmoid() @ m.value


@form("squared relu", reason="the weights are relu of the scores")
def _(m: Any) -> Tensor:
    return scores_of(m).relu() @ m.value


@form("exponentials alone", reason="the weights are exp of the scores")
def _(m: Any) -> Tensor:
    return scores_of(m).exp() @ m.value


@form("softmax plus one", reason="divided by something else than their sum")
def _(m: Any) -> Tensor:
    weights = scores_of(m).exp()
    return weights / (1.0 + weights.sum(-1, keepdim=True)) @ m.value


@form("sum with an epsilon", reason="divided by something else than their sum")
def _(m: Any) -> Tensor:
    scores = scores_of(m)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / (weights.sum(-1, keepdim=True) + 1e-6) @ m.value


@form("normed by all sums", reason="divided by something else than their sum")
def _(m: Any) -> Tensor:
    weights = scores_of(m).exp()
    return weights / weights.sum() @ m.value


@form("two softmaxes", reason="a second softmax")
def _(m: Any) -> Tensor:
    return scores_of(m).softmax(-1).softmax(-1) @ m.value


@form("dropout on the scores", reason="dropout on the scores")
def _(m: Any) -> Tensor:
    return F.dropout(scores_of(m), 0.1, training=True).softmax(-1) @ m.value


@form("two dropouts", reason="two dropouts")
def _(m: Any) -> Tensor:
    weights = F.dropout(scores_of(m).softmax(-1), 0.1, training=True)
    return F.dropout(weights, 0.2, training=True) @ m.value


@form("probabilities gated by a tensor", reason="the probabilities are changed before the product", gate=(T,))
def _(m: Any) -> Tensor:
    return (scores_of(m).softmax(-1) * m.gate) @ m.value


@form("heads mixed after the softmax", reason="the probabilities", mix=(H, H))
def _(m: Any) -> Tensor:
    """Talking heads."""
    return torch.einsum("hg,bgst->bhst", m.mix, scores_of(m).softmax(-1)) @ m.value


@form("heads mixed before the softmax", reason="keys and values vary along different dims", mix=(H, H))
def _(m: Any) -> Tensor:
    return torch.einsum("bgst,hg->bhst", scores_of(m), m.mix).softmax(-1) @ m.value


@form("difference of two softmaxes", reason="the probabilities are changed before the product")
def _(m: Any) -> Tensor:
    """Differential attention."""
    return (scores_of(m).softmax(-1) - 0.5 * scores_of(m).mul(0.3).softmax(-1)) @ m.value


@form("a mask that may still weigh", reason="may still get a weight", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    return scores_of(m).masked_fill(~mask[:, None, None], -10.0).softmax(-1) @ m.value


@form("masked scores become zero", reason="may still get a weight", **SQUARE)
def _(m: Any) -> Tensor:
    lower = torch.ones(S, S).tril().bool()
    return torch.where(lower, scores_of(m), 0.0).softmax(-1) @ m.value


def lengths() -> tuple[Tensor]:
    """A mask to add, of a batch that is padded on the left: its first rows see nothing but padding."""
    added = torch.zeros(B, S, dtype=torch.float64)
    added[0, :2] = LOWEST
    return (added,)


@form("left padding added to causal scores of a number", reason="may mask the rest of a row", inputs=lengths, **SQUARE)
def _(m: Any, mask: Tensor) -> Tensor:
    """GPT-Neo's order: causal by a number in place of scores, then the padding is added."""
    causal = torch.where(torch.ones(S, S).tril().bool(), scores_of(m), LOWEST)
    return (causal + mask[:, None, None, :]).softmax(-1) @ m.value


@form("causal scores of a number, over added left padding", reason="may mask the rest of a row", inputs=lengths, **SQUARE)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = scores_of(m) + mask[:, None, None, :]
    return torch.where(torch.ones(S, S).tril().bool(), scores, -1e9).softmax(-1) @ m.value


def left_padded() -> tuple[Tensor]:
    """Which keys a batch has, padded on the left."""
    return (torch.arange(S) >= torch.tensor([[2]] + [[0]] * (B - 1)),)


@form("left padding in the dtype of the queries", reason="may mask the rest of a row", inputs=left_padded, **SQUARE)
def _(m: Any, mask: Tensor) -> Tensor:
    causal = torch.where(torch.ones(S, S).tril().bool(), scores_of(m), LOWEST)
    return (causal + (1.0 - mask[:, None, None, :].type_as(m.query)) * LOWEST).softmax(-1) @ m.value


@form("left padding joined with a learned bias", reason="may mask the rest of a row", inputs=left_padded, bias=(H, S, S), **SQUARE)
def _(m: Any, mask: Tensor) -> Tensor:
    """T5's way to join the two, over scores that are masked by a number."""
    causal = torch.where(torch.ones(S, S).tril().bool(), scores_of(m), LOWEST)
    return (causal + (m.bias + (1.0 - mask[:, None, None, :].double()) * LOWEST)).softmax(-1) @ m.value


@form("a row of -inf", reason="a row that is known before it runs attends to nothing", **SQUARE)
def _(m: Any) -> Tensor:
    """Each row sees what is before it, and the first nothing: NaN."""
    return (scores_of(m).masked_fill(~torch.ones(S, S).tril(-1).bool(), -math.inf).softmax(-1) @ m.value).isnan().double()


@form("added after a mask of a number", reason="something is added after a mask", inputs=some_empty, bias=(H, S, T))
def _(m: Any, mask: Tensor) -> Tensor:
    """In a row that is masked wholly the bias decides."""
    return (scores_of(m).masked_fill(~mask[:, None, None], LOWEST) + m.bias).softmax(-1) @ m.value


@form("two masks of different numbers", reason="different numbers", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = scores_of(m).masked_fill(~mask[:, None, None], -1e9)
    return scores.masked_fill(torch.ones(S, T).triu(1).bool(), LOWEST).softmax(-1) @ m.value


@form("masks of -inf and of a number", reason="masks of −inf and of a number meet", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    scores = scores_of(m).masked_fill(~mask[:, None, None], -1e9)
    return scores.masked_fill(torch.ones(S, T).triu(1).bool(), -math.inf).softmax(-1) @ m.value


@form("probabilities zeroed elsewhere", reason="zeroed where the scores were not masked", inputs=padding)
def _(m: Any, mask: Tensor) -> Tensor:
    return scores_of(m).softmax(-1).masked_fill(~mask[:, None, None], 0.0) @ m.value


@form("scores clipped", reason="the scores go through clamp")
def _(m: Any) -> Tensor:
    return scores_of(m).clamp(-5, 5).softmax(-1) @ m.value


@form("rounded scores", reason="rounded to torch.bfloat16")
def _(m: Any) -> Tensor:
    return scores_of(m).bfloat16().softmax(-1).to(m.value.dtype) @ m.value


@form("weights rounded", reason="rounded to torch.float16")
def _(m: Any) -> Tensor:
    return scores_of(m).softmax(-1).half().to(m.value.dtype) @ m.value


@form("query written in between", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    query = m.query * 1.0 + 0.5
    scores = query @ m.key.mT
    query.add_(1.0)
    return scores.softmax(-1) @ m.value + query.sum()


@form("key written through a view before it is read", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    key = m.key.clone()
    key[..., 0].fill_(0.5)
    return (m.query @ key.mT).softmax(-1) @ m.value


@form("no product with values", reason="do not go into a product with values")
def _(m: Any) -> Tensor:
    return (scores_of(m).softmax(-1)[..., None] * m.value[:, :, None]).sum(-2)


@form("hard choice", reason="the probabilities")
def _(m: Any) -> Tensor:
    weights = scores_of(m).softmax(-1)
    hard = F.one_hot(weights.argmax(-1), T).to(weights.dtype)
    return (hard - weights.detach() + weights) @ m.value


@form("negated in place and read", reason="the scores are used elsewhere too")
def _(m: Any) -> tuple[Tensor, Tensor]:
    product = m.query @ m.key.mT
    return product.neg_().softmax(-1) @ m.value, product.exp()


@form("negated in place, seen in another shape", reason="the scores are used elsewhere too")
def _(m: Any) -> tuple[Tensor, Tensor]:
    product = m.query @ m.key.mT
    seen = product.view_as(product)
    return product.neg_().softmax(-1) @ m.value, seen.exp()


@form("keys negated in place between", reason="writes into an operand in place")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT
    m.key.squeeze((0,)).neg_()
    return scores.softmax(-1) @ m.value + m.key.sum()


@form("a part of the scores subtracted", reason="the mask depends on the scores")
def _(m: Any) -> Tensor:
    product = m.query @ m.key.mT
    return torch.subtract(product, product.tanh().mean(-2, keepdim=True)).softmax(-1) @ m.value


@form("over the sum of columns, broadcast", reason="the softmax runs over another dim")
def _(m: Any) -> Tensor:
    powers = (m.query @ m.key.mT).exp()
    return torch.divide(powers, torch.broadcast_to(powers.sum(-2, keepdim=True), powers.shape)) @ m.value


@form("exp of scores less twice logsumexp", reason="the weights are exp of the scores, not a softmax")
def _(m: Any) -> Tensor:
    scores = m.query @ m.key.mT
    return torch.subtract(scores, scores.logsumexp(-1, keepdim=True), alpha=2).exp() @ m.value
