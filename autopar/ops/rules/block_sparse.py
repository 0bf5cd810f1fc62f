"""Block-sparse attention and its backward (`autopar/kernels/block_sparse.py`).

    b  batch                              g  key heads        r  query heads to a key head
    n  blocks of queries, i inside one    t  key length       d, e  head dims of query and value

The query length is split between its blocks, where all are whole and no causal mask counts positions from 0. Inside blocks it is
not, and neither are key length and head dims. The layout is split with what it has: batch, heads, blocks of queries.
Ranks that split r or n share the key heads: their key and value gradients are sums.

FLOPs are those of the dense products, an upper bound: how many blocks there are is not known when a program is planned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node

from autopar.ops.rule import Label, Labels, Rule, rule
from autopar.ops.rules.labels import aligned, numel, position_of, shape_of


class _Spaces(NamedTuple):
    """Labels of query, key (value, too) and layout, and the sizes of labels that share a dim."""

    query: Labels
    key: Labels
    layout: Labels
    sizes: dict[str, int]


def _spaces(node: Node, query: Any, key: Any, layout: Any) -> _Spaces:
    (batch, heads, length, _), key_heads = shape_of(query), shape_of(key)[1]
    block_size: Any = node.kwargs["block_size"]
    sizes = dict[str, int]()
    head: Label = "g"
    if heads != key_heads:
        head = ("g", "r")
        sizes |= {"g": key_heads, "r": heads // key_heads}
    positions: Label = None
    if not node.kwargs["is_causal"] and length % block_size == 0:
        positions = ("n", "i")
        sizes |= {"n": length // block_size, "i": block_size}
    # A layout of size 1 before its blocks is shared by the whole batch, or by all heads.
    shape = shape_of(layout)
    lead = [label if size == whole else None for label, size, whole in zip(("b", head), (1, *shape)[-4:-2], (batch, heads), strict=True)]
    rows = "n" if positions else None
    return _Spaces(("b", head, positions, None), ("b", "g", None, None), (*lead, rows, None)[-len(shape) :], sizes)


def _flops(query: Any, value: Any, products_of_query: int, products_of_value: int) -> float:
    """Of products [B, H, S, T] over the query's and the value's head dims."""
    scores = (*shape_of(query)[:3], shape_of(value)[2])
    return 2.0 * numel(scores) * (products_of_query * shape_of(query)[3] + products_of_value * shape_of(value)[3])


@rule("autopar.block_sparse_attention.default")
def block_sparse_attention(node: Node) -> Rule:
    """(query[b, h, s, d], key[b, g, t, d], value[b, g, t, e], layout[b?, h, s / i, t / i]) → (output[b, h, s, e], log_sum_exp[b, h, s])."""
    query, key, value, layout = node.args
    spaces = _spaces(node, query, key, layout)
    pairs = [(query, spaces.query), (key, spaces.key), (value, spaces.key), (layout, spaces.layout)]
    results = (spaces.query, spaces.query[:3])
    return Rule(aligned(node, pairs), results, blocked=frozenset({"i"}), flops=_flops(query, value, 1, 1), sizes=spaces.sizes)


@rule("autopar.block_sparse_attention_backward.default")
def block_sparse_attention_backward(node: Node) -> Rule:
    """(gradients of output and log_sum_exp?, query, key, value, layout, output, log_sum_exp) → (query, key, value) gradients."""
    gradient, gradient_of_sum, query, key, value, layout, output, log_sum_exp = node.args
    spaces = _spaces(node, query, key, layout)
    pairs = [(gradient, spaces.query), (gradient_of_sum, spaces.query[:3]), (query, spaces.query), (key, spaces.key)]
    pairs += [(value, spaces.key), (layout, spaces.layout), (output, spaces.query), (log_sum_exp, spaces.query[:3])]
    linear = position_of(node, gradient) | position_of(node, gradient_of_sum)
    return Rule(
        aligned(node, pairs),
        (spaces.query, spaces.key, spaces.key),
        blocked=frozenset({"i"}),
        linear=(linear,),
        # Scores again, and the gradients of query and key: 3 products over d; of value and scores: 2 over e.
        flops=_flops(query, value, 3, 2),
        sizes=spaces.sizes,
    )
