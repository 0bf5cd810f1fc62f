"""Which values of a FORWARD program are learned: made of parameters, and of what layers make of a batch."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.differentiable import is_float

aten = torch.ops.aten

# Of these what is added counts alone, if anything is: a product with what is learned is learned, and so is what is looked up in it.
_ADDED: dict[object, int] = {aten.addmm: 1, aten.baddbmm: 1}
_CONTRACTIONS = frozenset((
    *_ADDED, aten.linear, aten.matmul, aten.mm, aten.bmm, aten.einsum, aten.embedding, aten.embedding_bag, aten.convolution,
    aten.conv1d, aten.conv2d, aten.conv3d, aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d,
    aten.scaled_dot_product_attention,
))  # fmt: skip
# Of these the first operand counts alone: the others say a shape, a dtype or places.
_OF_FIRST = frozenset((
    aten.type_as, aten.expand_as, aten.view_as, aten.reshape_as, aten.index, aten.index_select, aten.gather,
))  # fmt: skip
# Added to a score, no number above this masks it.
_LEAST = -1e3


def learned(constants: Constants) -> frozenset[Node]:
    """Of their program the floats made of parameters, and of what layers make of a batch: no masks, which a batch or a buffer brings as
    they are."""
    found = {node for item, node in constants.program.named_inputs() if item.kind == "parameter"}
    for node in constants.program.graph.nodes:
        if node.op == "call_function" and is_float(node) and _is_learned(node, found, constants):
            found.add(node)
    return frozenset(found)


def _is_learned(node: Node, found: set[Node], constants: Constants) -> bool:
    op = getattr(node.target, "overloadpacket", node.target)
    read = [each for each in node.all_input_nodes if is_float(each)]
    if op in _OF_FIRST or node.target is aten.to.other:
        read = [each for each in read if each is node.args[0]]
    literals = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, (int, float))]
    if found.isdisjoint(read) or any(each < _LEAST for each in literals):
        return False
    if op in _CONTRACTIONS:
        read = read[: _ADDED.get(op, 0)]
    return all(each in found or _is_small(each, constants) for each in read)


def _is_small(node: Node, constants: Constants) -> bool:
    """Whether a value is known, and no number in it as low as those that mask."""
    value = constants.value(node)
    return value is not None and not value.is_complex() and bool((value >= _LEAST).all())
