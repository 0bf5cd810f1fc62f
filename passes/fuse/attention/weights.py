"""From the product with the values up to the softmax: dropout, casts, factors, and zeros where nothing is attended to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.ir.arguments import float_at, node_at
from autopar.ir.fusion import NotFusible
from autopar.ops.traits import NEGATIONS, is_cast
from autopar.passes.fuse.attention.layout import Labels, Layout, Placed, above
from autopar.passes.fuse.attention.scores import DROPOUTS, reaches_product
from autopar.passes.fuse.attention.softmax import Softmax, softmax_at, sunk_softmax_at
from autopar.passes.fuse.reading import is_tensor, scaled

aten = torch.ops.aten

_ZEROING = (aten.masked_fill.Scalar, aten.masked_fill_.Scalar)


@dataclass
class Weights:
    """scale · dropout(softmax), the softmax's result carrying `layout`.

    `zeroed` are conditions under which a weight becomes 0; with `safe` rows that attend to nothing do. `dropped` is the value of which
    some are dropped.
    """

    softmax: Softmax
    layout: Layout
    scale: float = 1.0
    dropout: float = 0.0
    dropped: Placed | None = None
    safe: bool = False
    zeroed: list[Node] = field(default_factory=list)


def weights_above(node: Node, layout: Layout, labels: Labels, constants: Constants) -> Weights | None:
    """The attention weights that the operand `node` of a product holds; None where there is nothing like them. Raises `NotFusible`."""
    try:
        softmax = softmax_at(node) or sunk_softmax_at(node)
    except NotFusible:
        if reaches_product(node):
            raise
        return None
    if softmax is not None:
        # What attends to nothing leaves its weight to the sink.
        return Weights(softmax, layout, safe=softmax.spelled == "safe softmax" or softmax.sink is not None)
    factor = next(scaled(node, constants.number), None) if node.target not in NEGATIONS else None
    inner = above(node, layout, labels)
    if inner is None and (node.target in (*DROPOUTS, aten.nan_to_num.default, *_ZEROING) or is_cast(node)):
        inner = node_at(node, 0), layout
    elif inner is None and factor is not None:
        inner = factor[0], layout
    if inner is None:
        return _nothing_like_weights(node)
    found = weights_above(*inner, labels, constants)
    if found is not None:
        found.scale *= 1.0 if factor is None else factor[1]
        _note(node, layout, found, constants)
    return found


def _note(node: Node, layout: Layout, weights: Weights, constants: Constants) -> None:
    """What `node` does to the weights below it, but for a factor."""
    if node.target in DROPOUTS and node.args[2] and float_at(node, 1) > 0.0:
        if weights.dropout:
            raise NotFusible("there are two dropouts on the probabilities")
        weights.dropout, weights.dropped = float_at(node, 1), Placed(node, layout)
    elif node.target is aten.nan_to_num.default:
        if len(node.args) > 1 and node.args[1] not in (None, 0.0):
            raise NotFusible(f"a row that attends to nothing becomes {node.args[1]}")
        weights.safe = True
    elif node.target in _ZEROING:
        if constants.number(node.args[2]) != 0.0:
            raise NotFusible(f"probabilities are replaced by {node.args[2]}")
        weights.zeroed.append(node_at(node, 1))


def _nothing_like_weights(node: Node) -> Weights | None:
    """Silence, but where scores become weights in another way than by a softmax."""
    if not is_tensor(node) or node.op != "call_function" or not reaches_product(node):
        return None
    parts = str(node.target).split(".")
    name = parts[1] if len(parts) > 1 else "a result of an op with several"
    softmax = _softmax_near(node)
    if name in ("mul", "mul_", "div", "div_", "add", "sub", "where") and softmax is not None:
        raise NotFusible(f"the probabilities are changed before the product: {name} with a tensor")
    if name in ("sigmoid", "relu", "tanh", "softplus", "elu", "hardtanh", "square", "exp"):
        raise NotFusible(f"the weights are {name} of the scores, not a softmax")
    if softmax is not None:
        raise NotFusible(f"the probabilities go through {name}")
    return None


def _softmax_near(node: Node) -> Node | None:
    """A softmax among the operands of `node`, or one layout op or cast above them."""
    for operand in node.all_input_nodes:
        while operand.op == "call_function" and len(operand.all_input_nodes) == 1:
            try:
                if softmax_at(operand) is not None:
                    return operand
            except NotFusible:
                return operand
            operand = operand.all_input_nodes[0]
    return None
