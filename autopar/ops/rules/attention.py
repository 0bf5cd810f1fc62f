"""Our attention op and its backward (`autopar/kernels/attention.py`).

    b  batch             g  key heads        r  query heads to a key head
    s  query length      t  key length       d, e  head dims of query and value

Key length and head dims are blocked. Ranks that split r share the key heads: their key and value
gradients are sums. A causal mask and a window count positions from 0, so s is whole under them. Ids of documents do not:
those of the queries are split with s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from autopar.ops.rule import Label, Labels, Rule, rule
from autopar.ops.rules.labels import aligned, numel, position_of, shape_of


def _spaces(query: Any, key: Any, is_positional: bool) -> tuple[Label, Label, Label, dict[str, int]]:
    """Labels of the query heads, the key heads and the query length, and the sizes of those that share a dim."""
    heads, key_heads = shape_of(query)[1], shape_of(key)[1]
    length = None if is_positional else "s"
    if heads == key_heads:
        return "g", "g", length, {}
    return ("g", "r"), "g", length, {"g": key_heads, "r": heads // key_heads}


def _full(labels: Labels, tensor: Any, whole: tuple[int, ...]) -> Labels:
    """Labels of a mask, or of ids, that may lack leading dims and have size 1 where it is broadcast."""
    if not isinstance(tensor, Node):
        return ()
    shape = shape_of(tensor)
    offset = len(labels) - len(shape)
    return tuple(labels[offset + i] if size == whole[offset + i] else None for i, size in enumerate(shape))


def _masking(masking: Sequence[Any], scores: Labels, shape: tuple[int, ...]) -> list[tuple[Any, Labels]]:
    """(mask, documents of the queries and of the keys, what is drawn from: rows, second, columns) with labels of scores of `shape`."""
    mask, of_query, of_key, *rows, columns = masking
    b, _, s, t = scores
    pairs = [(mask, _full(scores, mask, shape)), (of_query, _full((b, s), of_query, shape[::2]))]
    pairs += [(of_key, _full((b, t), of_key, (shape[0], shape[3]))), (columns, _full((t,), columns, shape[3:]))]
    return [*pairs, *((each, _full((*scores[:3], None), each, (*shape[:3], 1))) for each in rows)]


def _is_positional(node: Node) -> bool:
    return bool(node.kwargs["is_causal"]) or bool(node.kwargs["window"])


def _gradients(node: Node) -> frozenset[int]:
    """The op is linear in the gradients of both results together."""
    return position_of(node, node.args[0]) | position_of(node, node.args[1])


@rule("autopar.attention.default")
def attention(node: Node) -> Rule:
    """(query[b, h, s, d], key[b, g, t, d], value[b, g, t, e], mask?, query_documents[b, s]?, key_documents[b, t]?, drop_rows[b, h, s, 1]?,
    drop_second?, drop_columns[t]?) → (output[b, h, s, e], log_sum_exp[b, h, s])."""
    query, key, value, *masking = node.args
    heads, key_heads, length, sizes = _spaces(query, key, _is_positional(node))
    scores, q, kv = ("b", heads, length, None), ("b", heads, length, None), ("b", key_heads, None, None)
    shape = (*shape_of(query)[:3], shape_of(key)[2])
    pairs = [(query, q), (key, kv), (value, kv), *_masking(masking, scores, shape)]
    flops = 2.0 * numel(shape) * (shape_of(query)[3] + shape_of(value)[3])
    return Rule(aligned(node, pairs), (q, q[:3]), flops=flops, sizes=sizes)


@rule("autopar.attention_backward.default")
def attention_backward(node: Node) -> Rule:
    """(gradients of output and log_sum_exp?, operands of the forward, output, log_sum_exp) → (query, key, value) gradients."""
    gradient, gradient_of_sum, query, key, value, *masking, output, log_sum_exp = node.args
    heads, key_heads, length, sizes = _spaces(query, key, _is_positional(node))
    scores, q, kv = ("b", heads, length, None), ("b", heads, length, None), ("b", key_heads, None, None)
    shape = (*shape_of(query)[:3], shape_of(key)[2])
    pairs = [
        (gradient, q),
        (gradient_of_sum, q[:3]),
        (query, q),
        (key, kv),
        (value, kv),
        *_masking(masking, scores, shape),
        (output, q),
        (log_sum_exp, q[:3]),
    ]
    # Scores again, and the gradients of query and key: 3 products over d; of value and scores: 2 over e.
    flops = 2.0 * numel(shape) * (3 * shape_of(query)[3] + 2 * shape_of(value)[3])
    return Rule(aligned(node, pairs), (q, kv, kv), linear=(_gradients(node),), flops=flops, sizes=sizes)


@rule("autopar.attention_mask_gradient.default")
def attention_mask_gradient(node: Node) -> Rule:
    """(as of the backward, mask given) → gradient of the mask, summed over what it is broadcast over."""
    gradient, gradient_of_sum, query, key, value, *masking, output, log_sum_exp = node.args
    heads, key_heads, length, sizes = _spaces(query, key, _is_positional(node))
    # A row that the mask masks wholly is normalised over all of its keys, so those stay whole.
    scores, q, kv = ("b", heads, length, None), ("b", heads, length, None), ("b", key_heads, None, None)
    shape = (*shape_of(query)[:3], shape_of(key)[2])
    own = _full(scores, masking[0], shape)
    pairs = [(gradient, q), (gradient_of_sum, q[:3]), (query, q), (key, kv), (value, kv), *_masking(masking, scores, shape)]
    pairs += [(output, q), (log_sum_exp, q[:3])]
    # Scores again over d, and the gradient of the probabilities over e.
    flops = 2.0 * numel(shape) * (shape_of(query)[3] + shape_of(value)[3])
    return Rule(aligned(node, pairs), (own,), linear=(_gradients(node),), flops=flops, sizes=sizes)
