"""Block-sparse attention and its backward in plain ops, block of queries by block of queries: what `block_sparse.py` means.

With the scores of a row's own keys alone:

scores = scale · Q Kᵀ        P = softmax(scores)        out = P V        L = log_sum_exp
dS     = P ∘ (dO Vᵀ − rowsum(dO ∘ out) + dL)            (Dao et al., FlashAttention, 2022, appendix B)
dQ, dK = scale · dS K, scale · dSᵀ Q                    dV = Pᵀ dO

Computed in float32 (float64 for float64). Only the keys that a block of queries attends to are gathered, so that what is held at once
is a block's scores, and nothing of a masked block is read. Heads that share their layout are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from autopar.kernels.attention_reference import heads_inside
from autopar.kernels.registration import accumulation_dtype


class BlockOptions(TypedDict):
    """What the block-sparse ops take besides tensors."""

    block_size: int
    is_causal: bool
    scale: float


@dataclass(frozen=True)
class Piece:
    """A block of queries of the heads that share a layout, and the keys that it attends to; there are some.

    `lead` picks batch, key head and member of [B, G, H / G, …]; `keys` are positions [K] int64, ascending.
    """

    lead: tuple[slice, slice, slice]
    rows: slice
    keys: Tensor

    def queries_of(self, value: Tensor) -> Tensor:
        """[b, g, r, block, …] of [B, G, R, S, …]: a view."""
        return value[(*self.lead, self.rows)]

    def keys_of(self, value: Tensor) -> Tensor:
        """[b, g, 1, K, …] of [B, G, T, …]."""
        return value[self.lead[:2]].index_select(2, self.keys).unsqueeze(2)

    def scores(self, query: Tensor, key: Tensor, options: BlockOptions) -> Tensor:
        """[b, g, r, block, K]. Each row has a score that is not masked: blocks beyond the diagonal are in no piece."""
        scores = self.queries_of(query) @ self.keys_of(key).mT * options["scale"]
        if not options["is_causal"]:
            return scores
        positions = torch.arange(self.rows.start, self.rows.stop, device=self.keys.device)
        return scores.masked_fill(self.keys > positions[:, None], -torch.inf)


def forward_reference(query: Tensor, key: Tensor, value: Tensor, layout: Tensor, **options: Unpack[BlockOptions]) -> tuple[Tensor, Tensor]:
    """(out, log_sum_exp)."""
    exact, num_groups = accumulation_dtype(query), key.shape[1]
    grouped, key, value = _grouped(query, num_groups).to(exact), key.to(exact), value.to(exact)
    out, log_sum_exp = grouped.new_zeros((*grouped.shape[:4], value.shape[-1])), grouped.new_zeros(grouped.shape[:4])
    for piece in _pieces(layout, query.shape, num_groups, key.shape[2], options):
        scores = piece.scores(grouped, key, options)
        logarithm = scores.logsumexp(-1)
        piece.queries_of(log_sum_exp).copy_(logarithm)
        piece.queries_of(out).copy_((scores - logarithm.unsqueeze(-1)).exp_() @ piece.keys_of(value))
    return heads_inside(out.flatten(1, 2).to(query.dtype)), heads_inside(log_sum_exp.flatten(1, 2))


def backward_reference(
    grad_out: Tensor,
    grad_log_sum_exp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    **options: Unpack[BlockOptions],
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad of query, key, value)."""
    exact, num_groups = accumulation_dtype(query), key.shape[1]
    row_sum = (grad_out.to(exact) * out.to(exact)).sum(-1)
    row_sum = row_sum if grad_log_sum_exp is None else row_sum - grad_log_sum_exp
    row_sum, log_sum_exp, grad = (_grouped(item.to(exact), num_groups) for item in (row_sum, log_sum_exp, grad_out))
    grouped, whole_key, whole_value = _grouped(query, num_groups).to(exact), key.to(exact), value.to(exact)
    grad_query, grad_key, grad_value = (torch.zeros_like(item) for item in (grouped, whole_key, whole_value))
    for piece in _pieces(layout, query.shape, num_groups, key.shape[2], options):
        probabilities = (piece.scores(grouped, whole_key, options) - piece.queries_of(log_sum_exp).unsqueeze(-1)).exp_()
        arrives = piece.queries_of(grad)
        _add_rows(grad_value, piece, probabilities.mT @ arrives)
        grad_scores = arrives @ piece.keys_of(whole_value).mT - piece.queries_of(row_sum).unsqueeze(-1)
        grad_scores = grad_scores.mul_(probabilities).mul_(options["scale"])
        piece.queries_of(grad_query).copy_(grad_scores @ piece.keys_of(whole_key))
        _add_rows(grad_key, piece, grad_scores.mT @ piece.queries_of(grouped))
    return (
        heads_inside(grad_query.flatten(1, 2).to(query.dtype)),
        heads_inside(grad_key.to(key.dtype)),
        heads_inside(grad_value.to(value.dtype)),
    )


def _pieces(layout: Tensor, shape: torch.Size, num_groups: int, key_length: int, options: BlockOptions) -> Iterator[Piece]:
    """One for each layout of its own and block of queries that attends to something."""
    block_size, repeats = options["block_size"], shape[1] // num_groups
    layout = layout.reshape((1,) * (4 - layout.dim()) + layout.shape)
    layout = layout.tril() if options["is_causal"] else layout
    inside = torch.arange(block_size, device=layout.device)
    for batch, head, row in layout.any(-1).nonzero().tolist():
        keys = (layout[batch, head, row].nonzero() * block_size + inside).flatten()
        lead = (
            slice(batch, batch + 1) if layout.shape[0] > 1 else slice(None),
            slice(head // repeats, head // repeats + 1) if layout.shape[1] > 1 else slice(None),
            slice(head % repeats, head % repeats + 1) if layout.shape[1] > 1 else slice(None),
        )
        rows = slice(row * block_size, min((row + 1) * block_size, shape[2]))
        yield Piece(lead, rows, keys[keys < key_length])


def _add_rows(total: Tensor, piece: Piece, part: Tensor) -> None:
    """Add [b, g, r, K, …] to the piece's keys in [B, G, T, …], summed over the members r."""
    total[piece.lead[:2]].index_add_(2, piece.keys, part.sum(2))


def _grouped(value: Tensor, num_groups: int) -> Tensor:
    """[B, H, S, …] → [B, G, H / G, S, …]."""
    return value.unflatten(1, (num_groups, value.shape[1] // num_groups))
