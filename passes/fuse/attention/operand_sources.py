"""What queries, keys and values were before they were laid out, repeated, scaled by a number or made wider."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.ir.arguments import node_at
from autopar.ops.traits import PRODUCTS, QUOTIENTS, is_cast, widens
from autopar.passes.fuse.attention.layout import Labels, Layout, above, flat

aten = torch.ops.aten


@dataclass(frozen=True)
class Origin:
    """An operand is `scale` · `node`, which carries `layout`, but for how it lies."""

    node: Node
    layout: Layout
    scale: float = 1.0


def origins(node: Node, layout: Layout, labels: Labels, constants: Constants, strip_scales: bool) -> list[Origin]:
    """The operand `node` and what it came from, step by step upwards. In-place ops end the way: above them the value is another."""
    found = [Origin(node, layout)]
    while (step := _above(found[-1], labels, constants, strip_scales)) is not None:
        found.append(step)
    return [Origin(each.node, labels.layout(each.layout), each.scale) for each in found]


def best(candidates: list[Origin], wanted: Layout, labels: Labels) -> Origin:
    """The furthest that lies as `wanted`; where none does, the furthest of all."""
    fitting = [each for each in candidates if labels.layout(each.layout) == wanted]
    return fitting[-1] if fitting else candidates[-1]


def labels_of(candidates: list[Origin], labels: Labels) -> set[int]:
    """The labels that the furthest origin carries."""
    return set(labels.resolved(flat(candidates[-1].layout)))


def _above(origin: Origin, labels: Labels, constants: Constants, strip_scales: bool) -> Origin | None:
    node = origin.node
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if (moved := above(node, origin.layout, labels)) is not None:
        return Origin(*moved, origin.scale)
    if is_cast(node) and widens(node):
        return Origin(node_at(node, 0), origin.layout, origin.scale)
    if strip_scales and node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.neg.default):
        return _unscaled(origin, constants)
    return None


def _unscaled(origin: Origin, constants: Constants) -> Origin | None:
    node = origin.node
    if node.target is aten.neg.default:
        return Origin(node_at(node, 0), origin.layout, -origin.scale)
    left, right = node.args[:2]
    pairs = ((left, right),) if node.target in QUOTIENTS else ((left, right), (right, left))
    assert node.target in (*PRODUCTS, *QUOTIENTS)
    for value, other in pairs:
        number = constants.number(other)
        same = isinstance(value, Node) and tensor_of(value).shape == tensor_of(node).shape and tensor_of(value).is_floating_point()
        if number is not None and number != 0.0 and same:
            scale = origin.scale / number if node.target in QUOTIENTS else origin.scale * number
            return Origin(value, origin.layout, scale)  # type: ignore[arg-type]
    return None
