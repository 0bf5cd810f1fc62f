"""One attention, whole: from the product with the values upwards to queries, keys, values and masks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.graph.overwrites import between, sources_of, writers_of
from autopar.ir.fusion import NotFusible
from autopar.passes.fuse.attention.contractions import Contraction, contraction
from autopar.passes.fuse.attention.form import Attention, Heads
from autopar.passes.fuse.attention.layout import Labels, Layout, Placed, Scaled, flat
from autopar.passes.fuse.attention.masks import LOWEST, meaning
from autopar.passes.fuse.attention.operand_sources import best, labels_of, sources
from autopar.passes.fuse.attention.scores import NotScores, Scores, reaches_product, scores_above
from autopar.passes.fuse.attention.weights import Weights, weights_above
from autopar.passes.fuse.guards import check_kept, check_operands, readers_of
from autopar.passes.fuse.reading import is_tensor, widest


def match_attention(product: Node, constants: Constants) -> Attention | None:
    """The attention whose result is `product`; None where there is nothing like one. Raises `NotFusible`."""
    for side in (0, 1):
        labels = Labels()
        layout = labels.of_shape(tensor_of(product).shape)
        outer = contraction(product, layout, labels)
        node, operand_layout = outer.sides()[side]
        weights = weights_above(node, operand_layout, labels, constants)
        if weights is not None:
            try:
                return _match(outer, side, layout, weights, labels, constants)
            except NotScores:
                return None
    return None


def _match(outer: Contraction, side: int, layout: Layout, weights: Weights, labels: Labels, constants: Constants) -> Attention:
    """`weights` are what the operand `side` of the product `outer` holds."""
    (node, _), values = outer.sides()[side], outer.sides()[1 - side]
    softmax = weights.softmax
    scored = labels.layout(weights.layout)
    scores = scores_above(softmax.scores, scored, labels, scored[softmax.dim], constants)
    if outer.added is not None:
        raise NotFusible("something is added to the product with the values, in one call")
    scored = labels.layout(weights.layout)
    keys = scored[softmax.dim]
    if set(keys) != set(labels.resolved(outer.contracted)):
        raise NotFusible("the softmax runs over another dim than the product with the values sums over")
    operands = (*_query_and_key(scores.product, keys, labels), values)
    chains = [sources(*each, labels, constants, strip_scales=each is not values) for each in operands]
    sink = _sink(scores, weights, labels, constants)
    scored = labels.layout(weights.layout)  # again: the operands' views may have split labels
    heads = _heads(scored, softmax.dim, chains, labels)
    inner, columns = labels.resolved(scores.product.contracted), _columns(chains[2][0].layout, scored, labels)
    wanted = (heads.of_queries(inner), heads.of_keys(inner), heads.of_keys(columns))
    found = [best(chain, each, labels) for chain, each in zip(chains, wanted, strict=True)]
    query, key, value = found
    product = scores.product.node
    interior = between(product, node)
    if sink is not None:
        interior -= between(product, sink.node) - {product}
    lowest = torch.finfo(torch.float16).min if torch.float16 in _dtypes(between(product, softmax.scores)) else LOWEST
    dtype = _dtype(outer.node, found, interior)
    masks = meaning(scores.masks, heads.of_queries(heads.keys), labels, constants, weights, lowest)
    _check_masks(scores)
    _check_uses(interior, outer.node, between(softmax.node, node))
    read = (query, key, value, sink, heads, inner, columns, scores, weights, masks)
    result = Attention(outer.node, frozenset(interior), labels.layout(layout), *read, dtype, labels)
    _check_writes(result)
    return result


def _sink(scores: Scores, weights: Weights, labels: Labels, constants: Constants) -> Placed | None:
    """The sink's score before it was expanded; it lies as the scores do, but for the keys."""
    node = weights.softmax.sink
    if node is None:
        return None
    if scores.is_shifted:
        raise NotFusible("a number is added to the scores beside a sink")
    layout = tuple(() if dim == weights.softmax.dim else each for dim, each in enumerate(labels.layout(weights.layout)))
    return sources(node, layout, labels, constants, strip_scales=False)[-1]


def _query_and_key(product: Contraction, keys: tuple[int, ...], labels: Labels) -> tuple[tuple[Node, Layout], tuple[Node, Layout]]:
    sides = product.sides()
    holds = [set(keys) & set(labels.resolved(flat(layout))) for _, layout in sides]
    if bool(holds[0]) == bool(holds[1]) or set(keys) not in holds:
        raise NotFusible("the dim of the softmax is not one of the keys alone")
    return (sides[1], sides[0]) if holds[0] else (sides[0], sides[1])


def _heads(scored: Layout, dim: int, chains: list[list[Scaled]], labels: Labels) -> Heads:
    """Rows: the last dim of the scores with labels that neither keys nor values have. Earlier such labels repeat key heads."""
    shared = labels_of(chains[1], labels) | labels_of(chains[2], labels)
    outer = [each for position, each in enumerate(scored) if position != dim]
    own = [tuple(label for label in each if label not in shared) for each in outer]
    last = max((position for position, each in enumerate(own) if each), default=len(outer) - 1)
    rows, repeats = own[last] if outer else (), flat(tuple(own[:last]))
    kept = [tuple(label for label in each if label in shared) for each in outer]
    # A dim of size 1 counts, as a batch of one does; one that holds rows or repeats alone does not.
    dims = [each for position, each in enumerate(kept) if each or (position != last and not own[position])]
    outside = set(flat(tuple(dims)))
    if all(outside - labels_of(chain, labels) for chain in chains[1:]):
        raise NotFusible("keys and values vary along different dims of the scores")
    batch, groups = _batch_and_groups(dims)
    return Heads(batch, groups, repeats, rows, scored[dim])


def _batch_and_groups(dims: list[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last dim is of heads and those before it of batches; of one dim alone its first label counts batches."""
    if len(dims) > 1:
        return flat(tuple(dims[:-1])), dims[-1]
    return (dims[0][:1], dims[0][1:]) if dims else ((), ())


def _columns(value: Layout, scored: Layout, labels: Labels) -> tuple[int, ...]:
    own = set(flat(scored))
    return tuple(label for label in labels.resolved(flat(value)) if label not in own)


def _dtype(product: Node, found: list[Scaled], interior: set[Node]) -> torch.dtype:
    """The dtype of the op. Rounding to fewer bits than the operands have is part of what the model computes."""
    operands, wide = [tensor_of(each.node).dtype for each in found], widest(*(each.node for each in found), product)
    rounded = _dtypes(interior) - {torch.float32, torch.float64, *operands}
    if rounded:
        raise NotFusible(f"scores or probabilities are rounded to {min(rounded, key=str)}, the operands have {wide}")
    if not all(dtype.is_floating_point for dtype in operands):
        raise NotFusible(f"the operands are of {', '.join(map(str, operands))}")
    return wide


def _dtypes(nodes: Iterable[Node]) -> set[torch.dtype]:
    return {tensor_of(node).dtype for node in nodes if is_tensor(node) and tensor_of(node).is_floating_point()}


def _check_uses(interior: set[Node], product: Node, after: set[Node]) -> None:
    """`after` are the nodes that hold probabilities, not scores."""
    for node in sorted(interior):
        others = [user for user in readers_of(node) if user not in interior and user is not product]
        if others:
            user = "an output" if others[0].op == "output" else str(others[0].target)
            raise NotFusible(f"the {'probabilities' if node in after else 'scores'} are used elsewhere too, by {user}")


def _check_masks(scores: Scores) -> None:
    """A mask made of the scores would have to be computed from scores that the op does not give."""
    for part, what in (*((mask, "mask") for mask in scores.masks), *((factor, "scale") for factor in scores.tensor_scales)):
        if between(scores.product.node, part.node):
            raise NotFusible(f"the {what} depends on the scores")


def _check_writes(found: Attention) -> None:
    """The op reads its operands where the product with the values stood: none may have been written since it was made.

    Nor may what was read through have been, from an operand up to its origin, and above a mask that the op has in other words.
    """
    if not (writers := writers_of(found.root.graph)):
        return
    masks, kept = [mask.node for mask in found.scores.masks], found.masks.nodes()
    read = {*(factor.node for factor in found.scores.tensor_scales), *masks, *kept}
    read |= set() if found.sink is None else {found.sink.node}
    operands = (*found.scores.product.node.all_input_nodes, *found.root.all_input_nodes)
    passed = {node for each in (found.query, found.key, found.value) for operand in operands for node in between(each.node, operand)}
    passed |= sources_of(mask for mask in masks if mask not in kept)
    check_operands(read | passed, found.root, writers, "between where it is made and the product", found.interior | passed)
    check_kept((*read, found.query.node, found.key.node, found.value.node), found.root, writers)


def why_not_used(softmax: Node) -> str | None:
    """Why the probabilities `softmax` of scores belong to no attention; None where they are none of scores."""
    if not reaches_product(softmax):
        return None
    names = sorted({"an output" if user.op == "output" else str(user.target) for user in softmax.users})
    return f"the probabilities do not go into a product with values but into {', '.join(names)}"
