"""How the attention ops of `attention.py` are split over ranks.

    b  batch             g  key heads        r  query heads to a key head
    s  query length      t  key length       d, e  head dims of query and value

Key length and head dims stay whole. Ranks that split r share the key heads: their key and value gradients are sums. A causal mask and
a window count positions from 0, so s is whole under them. Ids of documents do not: those of the queries are split with s.
"""

from __future__ import annotations

import math
from typing import Any

from autopar.kernels.registration import Label, Labels, Shape, SplitRule, broadcast


class _Spaces:
    """Labels of query, key (value, too) and what masks scores [b, h, s, t]; the sizes of labels that share a dim."""

    def __init__(self, query: Shape, key: Shape, masking: tuple[Shape | None, ...], options: dict[str, Any]) -> None:
        heads, key_heads = query[1], key[1]
        length = None if options["is_causal"] or options["window"] else "s"
        head: Label = "g" if heads == key_heads else ("g", "r")
        self.sizes = {} if heads == key_heads else {"g": key_heads, "r": heads // key_heads}
        self.query: Labels = ("b", head, length, None)
        self.key: Labels = ("b", "g", None, None)
        self.scores: Shape = (*query[:3], key[2])
        b, h, s, t = self.scores
        # The whole of: mask, documents of the queries and of the keys, what is drawn from: rows, second, columns.
        whole = ((b, h, s, t), (b, s), (b, t), (b, h, s, 1), (b, h, s, 1), (t,))
        labels: tuple[Labels, ...] = (self.query, ("b", length), ("b", None), self.query, self.query, (None,))
        given = zip(masking, labels, whole, strict=True)
        self.masking = tuple(() if shape is None else broadcast(shape, to, size) for shape, to, size in given)


def _flops(spaces: _Spaces, query: Shape, value: Shape, products_of_query: int, products_of_value: int) -> float:
    """Of products [B, H, S, T] over the query's and the value's head dims."""
    return 2.0 * math.prod(spaces.scores) * (products_of_query * query[3] + products_of_value * value[3])


def forward_rule(query: Shape, key: Shape, value: Shape, *masking: Shape | None, **options: Any) -> SplitRule:
    spaces = _Spaces(query, key, masking, options)
    arguments = (spaces.query, spaces.key, spaces.key, *spaces.masking)
    flops = _flops(spaces, query, value, 1, 1)
    return SplitRule(arguments, (spaces.query, spaces.query[:3]), sizes=spaces.sizes, flops=flops)


def backward_rule(grad_out: Shape, grad_log_sum_exp: Shape | None, *operands: Any, **options: Any) -> SplitRule:
    """Linear in the gradients of both results together."""
    query, key, value, *masking, _, _ = operands
    spaces = _Spaces(query, key, tuple(masking), options)
    # Scores again, and the gradients of query and key: 3 products over d; of value and scores: 2 over e.
    flops = _flops(spaces, query, value, 3, 2)
    results = (spaces.query, spaces.key, spaces.key)
    return SplitRule(_backward_arguments(spaces), results, linear=(frozenset({0, 1}),), sizes=spaces.sizes, flops=flops)


def mask_gradient_rule(grad_out: Shape, grad_log_sum_exp: Shape | None, *operands: Any, **options: Any) -> SplitRule:
    """Summed over what the mask is broadcast over. A row that it masks wholly is normalised over all of its keys, so those stay whole."""
    query, key, value, *masking, _, _ = operands
    spaces = _Spaces(query, key, tuple(masking), options)
    # Scores again over d, and the gradient of the probabilities over e.
    flops = _flops(spaces, query, value, 1, 1)
    results = (spaces.masking[0],)
    return SplitRule(_backward_arguments(spaces), results, linear=(frozenset({0, 1}),), sizes=spaces.sizes, flops=flops)


def _backward_arguments(spaces: _Spaces) -> tuple[Labels, ...]:
    """(gradients of output and log_sum_exp, operands of the forward, output, log_sum_exp)."""
    rows = spaces.query[:3]
    return (spaces.query, rows, spaces.query, spaces.key, spaces.key, *spaces.masking, spaces.query, rows)
