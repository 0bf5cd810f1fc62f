"""Block-sparse attention as one op of ours, the same on every device, with its backward as a second one.

    out, log_sum_exp = block_sparse_attention(query, key, value, layout, block_size=64, is_causal=True)

The scores of queries and keys are a grid of blocks of `block_size` × `block_size`; `layout` says which of them there are:

               keys →
    queries    ■ · · ·        ■ computed
               ■ ■ · ·        · never loaded: neither time nor memory is spent on it, and nothing in it reaches a result
               · ■ ■ ·
               ■ · ■ ■

    out         = softmax(scale · Q Kᵀ within the blocks that there are) V, a row that attends to nothing being 0
    log_sum_exp = log Σ exp of the same scores, 0 in a row that attends to nothing; it has a gradient, too

Local windows, strides and global tokens are layouts (Child et al., 2019; Zaheer et al., Big Bird, 2020; Beltagy et al., 2020).
A program that sparsifies by itself passes a layout that it has computed; no value of it is looked at before the kernels run.

Results lie in memory as [B, S, H, E] ([B, S, H]): what follows attention merges the heads, which is then free.
`block_sparse_reference.py` has the formulas of the backward.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from autopar.kernels.block_sparse_reference import BlockOptions, backward_reference, forward_reference
from autopar.kernels.registration import Label, Labels, OpTraits, Shape, SplitRule, accumulation_dtype, register_op, runs_attention

BLOCK_SIZES = (16, 32, 64, 128)


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor,
    *,
    block_size: int,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of which only some blocks are computed: (out [B, H, S, E], log_sum_exp [B, H, S]).

    query       [B, H, S, D]
    key, value  [B, G, T, D] and [B, G, T, E]; H is a multiple of G, and query head h reads head h // (H / G)
    layout      bool [⌈S / block_size⌉, ⌈T / block_size⌉] with heads (H or 1) before it, or batch (B or 1) and heads; true = computed.
                It has no gradient. The last blocks may be ragged
    block_size  16, 32, 64 or 128
    is_causal   position s attends to t ≤ s only, inside the blocks; blocks beyond the diagonal are not computed whatever the layout says
    scale       of the scores; 1 / √D when not given

    `out` is of the query's dtype, log_sum_exp float64 for float64 inputs and float32 otherwise.
    Raises ValueError where shapes, the layout's dtype or the block size do not fit.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.autopar.block_sparse_attention(query, key, value, layout, block_size=block_size, is_causal=is_causal, scale=scale)


def _forward(query: Tensor, key: Tensor, value: Tensor, layout: Tensor, **options: Unpack[BlockOptions]) -> tuple[Tensor, Tensor]:
    _require(query, key, value, layout, options)
    if not runs_attention(query, value):
        return forward_reference(query, key, value, layout, **options)
    from autopar.kernels.gpu import block_sparse as gpu

    return gpu.forward(query, key, value, layout, **options)


def _backward(
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
    arguments = (grad_out, grad_log_sum_exp, query, key, value, layout, out, log_sum_exp)
    if not runs_attention(query, value):
        return backward_reference(*arguments, **options)
    from autopar.kernels.gpu import block_sparse_backward as gpu

    return gpu.backward(*arguments, **options)


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, layout: Tensor, **options: Unpack[BlockOptions]) -> tuple[Tensor, Tensor]:
    _require(query, key, value, layout, options)
    batch, num_heads, length, _ = query.shape
    out = query.new_empty((batch, length, num_heads, value.shape[-1])).transpose(1, 2)
    return out, query.new_empty((batch, length, num_heads), dtype=accumulation_dtype(query)).transpose(1, 2)


def _backward_fake(
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
    _require(query, key, value, layout, options)
    grad_query, grad_key, grad_value = (
        item.new_empty((item.shape[0], item.shape[2], item.shape[1], item.shape[3])).transpose(1, 2) for item in (query, key, value)
    )
    return grad_query, grad_key, grad_value


def _require(query: Tensor, key: Tensor, value: Tensor, layout: Tensor, options: BlockOptions) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4 or not _heads_fit(query, key, value):
        raise ValueError(f"block_sparse_attention takes [B, H, S, D], [B, G, T, D], [B, G, T, E] with H a multiple of G; got {shapes}")
    block_size = options["block_size"]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_sparse_attention's block_size is {block_size}, not one of {', '.join(map(str, BLOCK_SIZES))}")
    if layout.dtype != torch.bool:
        raise ValueError(f"block_sparse_attention's layout is {layout.dtype}, not torch.bool")
    grid = (-(-query.shape[2] // block_size), -(-key.shape[2] // block_size))
    lead = (query.shape[0], query.shape[1])[4 - layout.dim() :]
    fits = layout.dim() in (3, 4) and tuple(layout.shape[-2:]) == grid
    if not fits or any(size not in (1, whole) for size, whole in zip(layout.shape[:-2], lead, strict=True)):
        by_heads = f"[{query.shape[1]} or 1, {grid[0]}, {grid[1]}], or [{query.shape[0]} or 1, {query.shape[1]} or 1, {grid[0]}, {grid[1]}]"
        raise ValueError(
            f"block_sparse_attention's layout is {tuple(layout.shape)}; in blocks of {block_size}, {shapes} want {by_heads}: "
            "(batch,) heads, blocks of queries, blocks of keys"
        )


def _heads_fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    same = key.shape[0] == query.shape[0] and key.shape[3] == query.shape[3] and value.shape[:3] == key.shape[:3]
    return same and query.shape[1] % key.shape[1] == 0


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    # Nearly always log_sum_exp has no gradient.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_log_sum_exp: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grad_out = torch.zeros_like(saved[4]) if grad_out is None else grad_out
    grads = torch.ops.autopar.block_sparse_attention_backward(grad_out, grad_log_sum_exp, *saved, **ctx.options)
    return *grads, None


class _Spaces(NamedTuple):
    """Labels of query, key (value, too) and layout, and the sizes of labels that share a dim.

        b  batch                              g  key heads        r  query heads to a key head
        n  blocks of queries, i inside one

    The query length is split between its blocks, where all are whole and no causal mask counts positions from 0. Inside blocks it
    is not, and neither are key length and head dims. The layout is split with what it has: batch, heads, blocks of queries.
    Ranks that split r or n share the key heads: their key and value gradients are sums.
    """

    query: Labels
    key: Labels
    layout: Labels
    sizes: dict[str, int]


def _spaces(query: Shape, key: Shape, layout: Shape, block_size: int, is_causal: bool) -> _Spaces:
    (batch, heads, length, _), key_heads = query, key[1]
    sizes = dict[str, int]()
    head: Label = "g"
    if heads != key_heads:
        head = ("g", "r")
        sizes |= {"g": key_heads, "r": heads // key_heads}
    positions: Label = None
    if not is_causal and length % block_size == 0:
        positions = ("n", "i")
        sizes |= {"n": length // block_size, "i": block_size}
    # A layout of size 1 before its blocks is shared by the whole batch, or by all heads.
    lead = [label if size == whole else None for label, size, whole in zip(("b", head), (1, *layout)[-4:-2], (batch, heads), strict=True)]
    rows = "n" if positions else None
    return _Spaces(("b", head, positions, None), ("b", "g", None, None), (*lead, rows, None)[-len(layout) :], sizes)


def _flops(query: Shape, value: Shape, products_of_query: int, products_of_value: int) -> float:
    """Of dense products [B, H, S, T] over the query's and the value's head dims: an upper bound, blocks are not known to a plan."""
    return 2.0 * math.prod((*query[:3], value[2])) * (products_of_query * query[3] + products_of_value * value[3])


def _forward_rule(query: Shape, key: Shape, value: Shape, layout: Shape, *, block_size: int, is_causal: bool, scale: float) -> SplitRule:
    of_query, of_key, of_layout, sizes = _spaces(query, key, layout, block_size, is_causal)
    arguments, results = (of_query, of_key, of_key, of_layout), (of_query, of_query[:3])
    return SplitRule(arguments, results, blocked=frozenset({"i"}), sizes=sizes, flops=_flops(query, value, 1, 1))


def _backward_rule(*shapes: Any, block_size: int, is_causal: bool, scale: float) -> SplitRule:
    query, key, value, layout = shapes[2:6]
    of_query, of_key, of_layout, sizes = _spaces(query, key, layout, block_size, is_causal)
    return SplitRule(
        (of_query, of_query[:3], of_query, of_key, of_key, of_layout, of_query, of_query[:3]),
        (of_query, of_key, of_key),
        blocked=frozenset({"i"}),
        linear=(frozenset({0, 1}),),
        sizes=sizes,
        # Scores again, and the gradients of query and key: 3 products over d; of value and scores: 2 over e.
        flops=_flops(query, value, 3, 2),
    )


_OPTIONS = "*, int block_size, bool is_causal, float scale"
register_op(
    "block_sparse_attention",
    f"(Tensor query, Tensor key, Tensor value, Tensor layout, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    OpTraits(_forward_rule),
)
register_op(
    "block_sparse_attention_backward",
    "(Tensor grad_out, Tensor? grad_log_sum_exp, Tensor query, Tensor key, Tensor value, Tensor layout, Tensor out, Tensor log_sum_exp, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    OpTraits(_backward_rule),
)
torch.library.register_autograd("autopar::block_sparse_attention", _differentiate, setup_context=_save)
